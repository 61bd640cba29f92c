// Four-bit codes that stand for levels of a table.

const float IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice the values of the four-bit float E2M1; the scales carry the other half.
const float E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

vec4 iq4_levels(uint nibbles) {
    const uvec4 q = bytes(nibbles & 0x0F0F0F0F);
    return vec4(IQ4[q.x], IQ4[q.y], IQ4[q.z], IQ4[q.w]);
}

vec4 e2m1_levels(uint nibbles) {
    const uvec4 q = bytes(nibbles & 0x0F0F0F0F);
    return vec4(E2M1[q.x], E2M1[q.y], E2M1[q.z], E2M1[q.w]);
}
