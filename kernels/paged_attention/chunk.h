// Where the keys and values of a chunk lie in the cache.
#pragma once

#include "attention.h"

namespace batchinfer {

// A chunk of keys of one sequence and KV head: those in [first_key, end_key) up to the chunk's end.
struct Place {
    int64_t sequence, kv_head, first_key, end_key;
};

// GROUP neighbouring keys and values, of which the first `count` are the sequence's. The memory of all can be read.
struct Group {
    const char *keys, *values;
    const float *key_scales, *value_scales;  // read where the cache has scales a token
    int count;
};

class Chunk {
   public:
    Group groups[CHUNK / GROUP];

    void locate(const Problem& p, const Place& place) {
        int64_t start = place.first_key / CHUNK * CHUNK, size = GROUP * p.row_bytes();
        char* memory = staged_.at_least(size_t(2 * CHUNK / GROUP * size));
        for (int g = 0; g < CHUNK / GROUP; g++, memory += 2 * size) {
            int64_t first = start + g * GROUP, end = std::min(first + GROUP, place.end_key);
            float* scales = staged_scales_ + g * 2 * GROUP;
            groups[g] = {memory, memory + size, scales, scales + GROUP, 0};
            if (end <= std::max(first, place.first_key)) continue;  // neither the sequence's nor in sight
            groups[g].count = int(end - first);
            if (p.block_size % GROUP == 0)
                point_into_cache(p, place, first, groups[g]);
            else
                copy_from_cache(p, place, first, end, groups[g]);
        }
    }

   private:
    static int64_t block_of(const Problem& p, const Place& place, int64_t key) {
        return p.block_table[place.sequence * p.max_blocks + key / p.block_size];
    }

    static void point_into_cache(const Problem& p, const Place& place, int64_t first, Group& group) {
        int64_t block = block_of(p, place, first), at = first % p.block_size;
        int64_t bytes = p.place_of(block, place.kv_head, at), scale = p.scale_of(block, place.kv_head, at);
        group.keys = p.k_cache + bytes, group.values = p.v_cache + bytes;
        if (p.scales_per_token) group.key_scales = p.k_scale + scale, group.value_scales = p.v_scale + scale;
    }

    // For blocks that do not hold whole groups. Places before the first key in sight become zeros: their block may
    // have gone to another sequence.
    static void copy_from_cache(const Problem& p, const Place& place, int64_t first, int64_t end, Group& group) {
        int64_t bytes = p.row_bytes();
        char *keys = const_cast<char*>(group.keys), *values = const_cast<char*>(group.values);
        float *key_scales = const_cast<float*>(group.key_scales), *value_scales = const_cast<float*>(group.value_scales);
        std::memset(keys, 0, size_t(GROUP * bytes)), std::memset(values, 0, size_t(GROUP * bytes));
        std::fill_n(key_scales, GROUP, 0.0f), std::fill_n(value_scales, GROUP, 0.0f);
        for (int64_t key = std::max(first, place.first_key); key < end; key++) {
            int64_t block = block_of(p, place, key), at = key - first;
            int64_t from = p.place_of(block, place.kv_head, key % p.block_size);
            std::memcpy(keys + at * bytes, p.k_cache + from, size_t(bytes));
            std::memcpy(values + at * bytes, p.v_cache + from, size_t(bytes));
            int64_t scale = p.scale_of(block, place.kv_head, key % p.block_size);
            if (p.scales_per_token) key_scales[at] = p.k_scale[scale], value_scales[at] = p.v_scale[scale];
        }
    }

    AlignedBuffer<char> staged_;
    alignas(64) float staged_scales_[2 * CHUNK] = {};
};

}  // namespace batchinfer
