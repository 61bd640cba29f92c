#version 450
#extension GL_GOOGLE_include_directive : require

// Q5_0: planes d (float16), qh (fifth bits, a word), qs (32 nibbles). d * (q - 16).

#define ELEMENTS 32
#define PARTS 2
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(0, block);
    const uint qh = word_at(1, block);
    for (uint i = 0; i < 2; ++i) {
        const uint j = part * 2 + i;
        const uint qs = word_at(2, block * 4 + j);
        w[i] = d * (vec4(bytes(qs & 0x0F0F0F0F | spread_bits(qh, 4 * j) << 4)) - 16.0);
        w[i + 2] = d * (vec4(bytes(qs >> 4 & 0x0F0F0F0F | spread_bits(qh, 4 * j + 16) << 4)) - 16.0);
    }
}

// Low nibbles are elements 0 to 15, high nibbles 16 to 31.
uint place(uint part, uint i) {
    return i / 2 * 4 + part * 2 + i % 2;
}
