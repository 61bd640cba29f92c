// Rows of a table, decoded into float32: the `main` of `*.gather.spv`. See weight.glsl.
//
// One workgroup makes one row. Arithmetic is `precise`: the same operations as on the host, so the same bits.

#define LANES 64

layout(local_size_x = LANES) in;

// The slice is as in the file: a field of the next block follows after a whole block, not after the field itself.
layout(constant_id = 0) const bool RAW = false;

layout(set = 0, binding = 1) readonly buffer Wanted {
    uvec2 wanted[]; // row in this slice, row of the result
};
layout(set = 0, binding = 2) writeonly buffer Result {
    uint y[]; // bits of float32: what is NaN or subnormal passes unchanged
};

layout(push_constant) uniform Sizes {
    uint count;        // rows wanted
    uint row_blocks;   // blocks of a row
    uint row_elements;
    uint y_offset;     // of the result's row 0
    uint block_bytes;
    uint planes[5];    // where each field's plane starts, in words; if raw, where the field starts in a block, in bytes
    uint fields[5];    // bytes of each field of a block
};

void main() {
    // The count of rows may exceed what one dimension of a dispatch allows.
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (group >= count) {
        return;
    }
    const uint row = wanted[group].x;
    const uint base = y_offset + wanted[group].y * row_elements;
    for (uint piece = gl_LocalInvocationID.x; piece < ROW_BLOCKS * PARTS; piece += LANES) {
        const uint column = piece / PARTS;
        const uint part = piece % PARTS;
        precise vec4 w[VECTORS];
        decode(row, column, part, w);
        // Backwards, as a piece may have nothing to say at its end, where it names the place of its beginning again.
        for (uint i = VECTORS; i-- > 0;) {
            const uint first = column * ELEMENTS + 4 * place(part, i);
            for (uint j = 0; j < 4; ++j) {
                if (first + j < row_elements) {
                    y[base + first + j] = floatBitsToUint(w[i][j]);
                }
            }
        }
    }
}
