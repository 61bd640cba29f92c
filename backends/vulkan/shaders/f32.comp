#version 450
#extension GL_GOOGLE_include_directive : require

// F32: float32 elements, one plane.

#define ELEMENTS 8
#define PARTS 1
#define VECTORS 2
#define ROW_BLOCKS ((row_blocks + ELEMENTS - 1) / ELEMENTS)
#include "weight.glsl"

void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]) {
    for (uint i = 0; i < ELEMENTS; ++i) {
        // Rows may end anywhere. x is padded with zeros, but what follows the row may be NaN, so it is never used.
        const uint k = column * ELEMENTS + i;
        w[i / 4][i % 4] = k < row_blocks ? uintBitsToFloat(word_at(0, row * row_blocks + k)) : 0.0;
    }
}

uint place(uint part, uint i) {
    return i;
}
