#version 450
#extension GL_GOOGLE_include_directive : require

// Q1_0: planes d (float16), qs (128 bits). A set bit is d, a clear one -d.

#define ELEMENTS 128
#define PARTS 8
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(0, block);
    const uint qs = word_at(1, block * 4 + part / 2);
    for (uint i = 0; i < VECTORS; ++i) {
        w[i] = d * (2.0 * vec4(bytes(spread_bits(qs, 16 * (part % 2) + 4 * i))) - 1.0);
    }
}

uint place(uint part, uint i) {
    return part * VECTORS + i;
}
