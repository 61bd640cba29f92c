// Four-bit codes that stand for sixteen levels, four signed bytes a word.
//
// An indexed table would do; but drivers put one in memory, and then the loads take most of the time.

// -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
const uvec4 IQ4 = uvec4(0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535);

// Twice the values of the four-bit float E2M1, as the scales carry the other half: 0 1 2 3, 4 6 8 12, and negative.
const uvec4 E2M1 = uvec4(0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC);

// The levels of the low nibbles of four bytes.
vec4 levels(uvec4 table, uint nibbles) {
    const uvec4 q = bytes(nibbles & 0x0F0F0F0F);
    const bvec4 odd = notEqual(q & 4, uvec4(0));
    const uvec4 lower = mix(table.xxxx, table.yyyy, odd);
    const uvec4 upper = mix(table.zzzz, table.wwww, odd);
    const uvec4 word = mix(lower, upper, greaterThanEqual(q, uvec4(8)));
    return vec4(ivec4(word << 24 - 8 * (q & 3)) >> 24);
}
