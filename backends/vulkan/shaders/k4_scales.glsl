// Scale and minimum of 32 elements of Q4_K and Q5_K: planes d, dmin (float16), scales (12 bytes).
//
// Bytes 0 to 3 and 4 to 7 hold the first four scales and minima in their low six bits; bytes 8 to 11 hold the low
// nibbles of the last four, whose upper two bits are at the top of bytes 0 to 7.
vec2 scale_and_minimum(uint block, uint i) {
    const uint shift = 8 * (i % 4);
    const uint low = word_at(2, block * 3) >> shift;
    const uint mid = word_at(2, block * 3 + 1) >> shift;
    const uint high = word_at(2, block * 3 + 2) >> shift;
    const uvec2 codes = i < 4 ? uvec2(low & 63, mid & 63)
                              : uvec2(high & 15 | low >> 2 & 48, high >> 4 & 15 | mid >> 2 & 48);
    return vec2(half_at(0, block), half_at(1, block)) * vec2(codes);
}
