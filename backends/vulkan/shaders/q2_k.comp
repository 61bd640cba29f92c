#version 450
#extension GL_GOOGLE_include_directive : require

// Q2_K: planes scales (16 bytes: scale, minimum), qs (256 codes of 2 bits), d, dmin (float16).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const uint qs = word_at(1, block * 16 + part);
    const float d = half_at(2, block);
    const float dmin = half_at(3, block);
    for (uint i = 0; i < VECTORS; ++i) {
        const uint scale = byte_at(0, block * 16 + place(part, i) / 4);
        w[i] = d * float(scale & 15) * vec4(bytes(qs >> 2 * i & 0x03030303)) - dmin * float(scale >> 4);
    }
}

// In each half of the block, 32 bytes hold elements 0 to 31 in their lowest two bits, 32 to 63 in the next, …
uint place(uint part, uint i) {
    return part / 8 * 32 + i * 8 + part % 8;
}
