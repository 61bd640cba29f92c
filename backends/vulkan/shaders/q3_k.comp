#version 450
#extension GL_GOOGLE_include_directive : require

// Q3_K: planes hmask (third bits), qs (256 codes of 2 bits), scales (16 of 6 bits), d (float16).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"

// Low nibbles in bytes 0 to 7, upper two bits in bytes 8 to 11.
float scale_at(uint block, uint i) {
    const uint low = byte_at(2, block * 12 + i % 8) >> 4 * (i / 8) & 15;
    const uint high = byte_at(2, block * 12 + 8 + i % 4) >> 2 * (i / 4) & 3;
    return float(low | high << 4) - 32.0;
}

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const uint hmask = word_at(0, block * 8 + part % 8);
    const uint qs = word_at(1, block * 16 + part);
    const float d = half_at(3, block);
    for (uint i = 0; i < VECTORS; ++i) {
        const uint third = hmask >> part / 8 * 4 + i & 0x01010101;
        const vec4 q = vec4(bytes(qs >> 2 * i & 0x03030303 | third << 2)) - 4.0;
        w[i] = d * scale_at(block, place(part, i) / 4) * q;
    }
}

// In each half of the block, 32 bytes hold elements 0 to 31 in their lowest two bits, 32 to 63 in the next, …
uint place(uint part, uint i) {
    return part / 8 * 32 + i * 8 + part % 8;
}
