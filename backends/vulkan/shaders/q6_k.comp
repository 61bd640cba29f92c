#version 450
#extension GL_GOOGLE_include_directive : require

// Q6_K: planes ql (256 nibbles), qh (upper two bits), scales (16 signed bytes), d (float16).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"

float scale_at(uint block, uint i) {
    return float(bitfieldExtract(int(word_at(2, block * 4 + i / 4)), int(8 * (i % 4)), 8));
}

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(3, block);
    const float low = d * scale_at(block, place(part, 0) / 4);
    const float high = d * scale_at(block, place(part, 2) / 4);
    const uint shift = part % 8 / 4 * 2;
    for (uint i = 0; i < 2; ++i) {
        const uint ql = word_at(0, block * 32 + part * 2 + i);
        const uint qh = word_at(1, block * 16 + part / 8 * 8 + part % 4 * 2 + i) >> shift;
        w[i] = low * (vec4(bytes(ql & 0x0F0F0F0F | (qh & 0x03030303) << 4)) - 32.0);
        w[i + 2] = high * (vec4(bytes(ql >> 4 & 0x0F0F0F0F | (qh >> 4 & 0x03030303) << 4)) - 32.0);
    }
}

// Of each 128 elements, low nibbles are the first 64 and high nibbles the last 64. The upper bits run in 32s.
uint place(uint part, uint i) {
    return part / 8 * 32 + i / 2 * 16 + part % 8 * 2 + i % 2;
}
