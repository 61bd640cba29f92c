#version 450

// Blocks as they are in the file, taken apart: each field of a block goes to a plane of its own.
//
// A workgroup takes a tile of blocks. It reads every word of them once, in the order in which they lie, since they may
// lie in the host's memory and come over the bus; and it writes whole words of each plane. Pieces of a slice, and tiles
// of a piece, begin at multiples of four blocks, so that no two share a word.

#define LANES 128
#define TILE_WORDS 2048
// Reading begins at a cache line.
#define LINE_BYTES 128

layout(local_size_x = LANES) in;

layout(set = 0, binding = 0) readonly buffer Blocks {
    uint blocks[];
};
layout(set = 0, binding = 1) writeonly buffer Planes {
    uint planes[];
};

layout(push_constant) uniform Sizes {
    uint count;       // blocks
    uint source;      // where the first begins, in bytes
    uint block_bytes;
    uint tile_blocks; // a multiple of 4
    uint fields;      // of a block
    uint sizes[5];    // bytes of each: 1, 2, or a multiple of 4
    uint targets[5];  // where the run of each begins, in words
};

shared uint tile[TILE_WORDS + LINE_BYTES / 4];

// The four bytes from byte `at` of the tile on.
uint word_at(uint at) {
    const uint word = tile[at / 4];
    const uint shift = 8 * (at % 4);
    return shift == 0 ? word : word >> shift | tile[at / 4 + 1] << 32 - shift;
}

void main() {
    const uint lane = gl_LocalInvocationID.x;
    // The count of tiles may exceed what one dimension of a dispatch allows.
    const uint first = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * tile_blocks;
    if (first >= count) {
        return;
    }
    const uint mine = min(tile_blocks, count - first);
    const uint begin = source + first * block_bytes;
    const uint lead = begin % LINE_BYTES;
    const uint words = (lead + mine * block_bytes + 3) / 4;
    for (uint i = lane; i < words; i += LANES) {
        tile[i] = blocks[(begin - lead) / 4 + i];
    }
    barrier();

    uint field = lead;
    for (uint f = 0; f < fields; ++f) {
        const uint size = sizes[f];
        const uint part = min(size, 4);
        const uint mask = 0xFFFFFFFFu >> 32 - 8 * part;
        const float inverse = 1.0 / float(size);
        const uint target = targets[f] + first / 4 * size;
        for (uint i = lane; i < (mine * size + 3) / 4; i += LANES) {
            uint word = 0; // and zeros behind the last byte
            for (uint j = 0; j < 4; j += part) {
                // Exact for numbers of this size, and faster than a division of integers.
                const uint block = uint((float(4 * i + j) + 0.5) * inverse);
                if (block < mine) {
                    word |= (word_at(field + block * (block_bytes - size) + 4 * i + j) & mask) << 8 * j;
                }
            }
            planes[target + i] = word;
        }
        field += size;
    }
}
