#version 450
#extension GL_GOOGLE_include_directive : require

// Q2_0: planes d (float16), qs (64 codes of 2 bits). d * (q - 1).

#define ELEMENTS 64
#define PARTS 4
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(0, block);
    const uint qs = word_at(1, block * 4 + part);
    for (uint i = 0; i < VECTORS; ++i) {
        const uint four = qs >> 8 * i;
        w[i] = d * (vec4(four & 3, four >> 2 & 3, four >> 4 & 3, four >> 6 & 3) - 1.0);
    }
}

uint place(uint part, uint i) {
    return part * VECTORS + i;
}
