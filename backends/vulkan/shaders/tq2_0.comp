#version 450
#extension GL_GOOGLE_include_directive : require

// TQ2_0: planes qs (256 codes of 2 bits), d (float16). d * (q - 1).

#define ELEMENTS 256
#define PARTS 16
#define VECTORS 4
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const uint qs = word_at(0, block * 16 + part);
    const float d = half_at(1, block);
    for (uint i = 0; i < VECTORS; ++i) {
        w[i] = d * (vec4(bytes(qs >> 2 * i & 0x03030303)) - 1.0);
    }
}

// In each half of the block, 32 bytes hold elements 0 to 31 in their lowest two bits, 32 to 63 in the next, …
uint place(uint part, uint i) {
    return part / 8 * 32 + i * 8 + part % 8;
}
