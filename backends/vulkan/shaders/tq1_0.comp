#version 450
#extension GL_GOOGLE_include_directive : require

// TQ1_0: planes qs (48 bytes of 5 ternary digits), qh (4 bytes of 4), d (float16). d * (digit - 1).

#define ELEMENTS 256
#define PARTS 13
#define VECTORS 5
#include "weight.glsl"

// A byte is a fraction of 256 in base 3: times 3^i, modulo 256, brings digit i to the top.
void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_at(2, block);
    uvec4 digits = bytes(part < 12 ? word_at(0, block * 12 + part) : word_at(1, block));
    for (uint i = 0; i < VECTORS; ++i) {
        w[i] = d * (vec4(digits * 3 >> 8) - 1.0);
        digits = digits * 3 & 0xFF;
    }
    if (part == 12) {
        w[4] = vec4(0.0); // qh has four digits
    }
}

// qs is 32 bytes with elements 0 to 159, then 16 with 160 to 239; qh has 240 to 255.
uint place(uint part, uint i) {
    if (part < 8) {
        return i * 8 + part;
    }
    return part < 12 ? 40 + i * 4 + part - 8 : 60 + i % 4;
}
