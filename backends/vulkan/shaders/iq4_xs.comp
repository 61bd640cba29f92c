#version 450
#extension GL_GOOGLE_include_directive : require

// IQ4_XS: planes d, scales_h (16 bits), scales_l (a word), qs (256 nibbles).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"
#include "levels.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const uint group = part / 2;
    const uint high = half_bits_at(1, block) >> 2 * group & 3;
    const uint low = word_at(2, block) >> 4 * group & 15;
    const float d = half_at(0, block) * (float(low | high << 4) - 32.0);
    for (uint i = 0; i < 2; ++i) {
        const uint qs = word_at(3, block * 32 + part * 2 + i);
        w[i] = d * levels(IQ4, qs);
        w[i + 2] = d * levels(IQ4, qs >> 4);
    }
}

// Of each 32 elements, low nibbles are the first 16 and high nibbles the last 16.
uint place(uint part, uint i) {
    return part / 2 * 8 + i / 2 * 4 + part % 2 * 2 + i % 2;
}
