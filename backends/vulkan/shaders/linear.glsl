// The product y = x W^T over a slice of a weight in the planar layout: the `main` of `*.spv`. See weight.glsl.
//
// LANES threads share a row and stride over its pieces, so that neighbours read neighbouring words. Each thread sums
// its pieces in float32, then the partial sums of a row are added: rounding errors grow with the length of a thread's
// share, not of the row.

#define LANES 16
#define ROWS 4
#define MAX_BATCH 4

layout(local_size_x = LANES, local_size_y = ROWS) in;

// Vectors of x that one decoding serves. Arrays have the largest size: not every driver takes a constant of the
// pipeline there.
layout(constant_id = 0) const uint BATCH = 1;

layout(set = 0, binding = 1) readonly buffer Operand {
    vec4 x[];
};
layout(set = 0, binding = 2) writeonly buffer Result {
    float y[];
};

layout(push_constant) uniform Sizes {
    uint rows;       // in this slice
    uint row_blocks; // blocks of a row
    uint vectors;    // vectors of x
    uint x_stride;   // vec4 from one vector of x to the next
    uint y_stride;   // floats from one vector of y to the next
    uint y_offset;   // of this slice's first row
    uint planes[5];  // where each field's plane starts, in words
};

shared float partial[MAX_BATCH * ROWS * LANES];

void main() {
    const uint lane = gl_LocalInvocationID.x;
    // The count of rows may exceed what one dimension of a dispatch allows.
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    const uint row = group * ROWS + gl_LocalInvocationID.y;
    const uint first = gl_WorkGroupID.z * BATCH;

    float sum[MAX_BATCH];
    for (uint b = 0; b < BATCH; ++b) {
        sum[b] = 0.0;
    }
    if (row < rows) {
        for (uint piece = lane; piece < ROW_BLOCKS * PARTS; piece += LANES) {
            const uint column = piece / PARTS;
            const uint part = piece % PARTS;
            vec4 w[VECTORS];
            decode(row, column, part, w);
            for (uint b = 0; b < BATCH; ++b) {
                // A batch that is not full repeats the last vector: cheaper than a branch, and never out of bounds.
                const uint base = min(first + b, vectors - 1) * x_stride + column * (ELEMENTS / 4);
                float products = 0.0;
                for (uint i = 0; i < VECTORS; ++i) {
                    products += dot(w[i], x[base + place(part, i)]);
                }
                sum[b] += products;
            }
        }
    }
    const uint mine = gl_LocalInvocationID.y * LANES;
    for (uint b = 0; b < BATCH; ++b) {
        partial[b * ROWS * LANES + mine + lane] = sum[b];
    }
    barrier();
    if (row < rows && lane < BATCH && first + lane < vectors) {
        float total = 0.0;
        for (uint i = 0; i < LANES; ++i) {
            total += partial[lane * ROWS * LANES + mine + i];
        }
        y[(first + lane) * y_stride + y_offset + row] = total;
    }
}
