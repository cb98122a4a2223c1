// What the cache's keys lack and kv_store and paged_attention must agree on.
#pragma once

#include <cstdint>

namespace batchinfer {

constexpr int64_t SEGMENT = 256;  // positions that share an offset of the keys; as in key_offset.py

}  // namespace batchinfer
