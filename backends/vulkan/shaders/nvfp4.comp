#version 450
#extension GL_GOOGLE_include_directive : require

// NVFP4: planes d (four unsigned E4M3 floats), qs (64 nibbles). A scale for each 16 elements.

#define ELEMENTS 64
#define PARTS 4
#define VECTORS 4
#include "weight.glsl"
#include "levels.glsl"

// Half of the E4M3 value, since the levels are doubled. 0x7F means zero.
float half_scale(uint code) {
    const uint exponent = code >> 3 & 15;
    const uint mantissa = code & 7;
    if (code == 0x7F) {
        return 0.0;
    }
    return exponent == 0 ? float(mantissa) * exp2(-10.0) : uintBitsToFloat(exponent + 119 << 23 | mantissa << 20);
}

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    const uint block = row * row_blocks + column;
    const float d = half_scale(byte_at(0, block * 4 + part));
    for (uint i = 0; i < 2; ++i) {
        const uint qs = word_at(1, block * 8 + part * 2 + i);
        w[i] = d * levels(E2M1, qs);
        w[i + 2] = d * levels(E2M1, qs >> 4);
    }
}

// Of each 16 elements, low nibbles are the first 8 and high nibbles the last 8.
uint place(uint part, uint i) {
    return part * VECTORS + i;
}
