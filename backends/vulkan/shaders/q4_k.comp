#version 450
#extension GL_GOOGLE_include_directive : require

// Q4_K: planes d, dmin (float16), scales (12 bytes), qs (256 nibbles).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"
#include "k4_scales.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const uint pair = part / 4 * 2;
    const vec2 low = scale_and_minimum(block, pair);
    const vec2 high = scale_and_minimum(block, pair + 1);
    for (uint i = 0; i < 2; ++i) {
        const uint qs = word_at(3, block * 32 + part * 2 + i);
        w[i] = low.x * vec4(bytes(qs & 0x0F0F0F0F)) - low.y;
        w[i + 2] = high.x * vec4(bytes(qs >> 4 & 0x0F0F0F0F)) - high.y;
    }
}

// Of each 64 elements, low nibbles are the first 32 and high nibbles the last 32.
uint place(uint part, uint i) {
    return part / 4 * 16 + i / 2 * 8 + part % 4 * 2 + i % 2;
}
