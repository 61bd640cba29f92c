#version 450
#extension GL_GOOGLE_include_directive : require

// Q8_0: planes d (float16), qs (32 signed bytes). d * q.

#define ELEMENTS 32
#define PARTS 2
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(0, block);
    for (uint i = 0; i < VECTORS; ++i) {
        w[i] = d * signed_bytes(word_at(1, block * 8 + part * VECTORS + i));
    }
}

uint place(uint part, uint i) {
    return part * VECTORS + i;
}
