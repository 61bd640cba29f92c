// What the shaders of all types share: access to the fields of a weight, and what is done with its elements.
//
// A shader defines, before it includes this file:
//   ELEMENTS  elements of a block, a multiple of 4
//   PARTS     equal pieces of a block; one thread decodes one piece at a time
//   VECTORS   vec4 of weights in a piece
// and after it, decode() and place(). Storage is read in 32-bit words, so no device feature is needed.
//
// Each is compiled twice: to multiply (linear.glsl), and with GATHER to give rows of a table (gather.glsl).

layout(set = 0, binding = 0) readonly buffer Weight {
    uint words[];
};

#ifndef ROW_BLOCKS
#define ROW_BLOCKS row_blocks
#endif

#ifdef GATHER
#define OUT precise out
#else
#define OUT out
#endif

// The weights of one piece: piece `part` of block `column` of `row`.
void decode(uint row, uint column, uint part, OUT vec4 w[VECTORS]);

// Which vec4 of the block's elements w[i] is.
uint place(uint part, uint i);

#ifdef GATHER
#include "gather.glsl"
#else
#include "linear.glsl"
#endif

#ifdef GATHER
// Where a byte of a field's plane is, if blocks lie as in the file.
uint raw_place(uint plane, uint i) {
    return i / fields[plane] * block_bytes + planes[plane] + i % fields[plane];
}

uint raw_byte_at(uint plane, uint i) {
    const uint at = raw_place(plane, i);
    return words[at / 4] >> 8 * (at % 4) & 0xFF;
}
#else
#define RAW false
#define raw_byte_at(plane, i) 0
#endif

uint word_at(uint plane, uint i) {
    if (RAW) {
        return raw_byte_at(plane, 4 * i) | raw_byte_at(plane, 4 * i + 1) << 8 | raw_byte_at(plane, 4 * i + 2) << 16
            | raw_byte_at(plane, 4 * i + 3) << 24;
    }
    return words[planes[plane] + i];
}

uint byte_at(uint plane, uint i) {
    return RAW ? raw_byte_at(plane, i) : word_at(plane, i / 4) >> 8 * (i % 4) & 0xFF;
}

uint half_bits_at(uint plane, uint i) {
    if (RAW) {
        return raw_byte_at(plane, 2 * i) | raw_byte_at(plane, 2 * i + 1) << 8;
    }
    return word_at(plane, i / 2) >> 16 * (i % 2) & 0xFFFF;
}

float half_at(uint plane, uint i) {
    return unpackHalf2x16(half_bits_at(plane, i)).x;
}

// The four bytes of a word, lowest first.
uvec4 bytes(uint word) {
    return uvec4(word & 0xFF, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 24);
}

vec4 signed_bytes(uint word) {
    const int i = int(word);
    return vec4(bitfieldExtract(i, 0, 8), bitfieldExtract(i, 8, 8), bitfieldExtract(i, 16, 8), i >> 24);
}

// Bits b to b + 3 of a word, each as the lowest bit of a byte.
uint spread_bits(uint word, uint b) {
    const uint four = word >> b & 0xF;
    return four & 1 | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21;
}
