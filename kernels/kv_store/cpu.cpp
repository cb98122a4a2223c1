// Native kv_store: quantises each head's vector and scatters it, with the keys' rotation on the way where asked.

#include "../common/key_offset.h"
#include "../rotary/rotate.h"

namespace batchinfer {
namespace {

// Keys or values: [num_tokens, num_kv_heads, head_dim], the last dimension dense, strides in elements; cache:
// [num_blocks, num_kv_heads, block_size, head_dim], each block dense; scale: [num_blocks, num_kv_heads, block_size], to be written,
// or static [num_kv_heads], or null.
struct Side {
    const void* values;
    void* cache;
    float* scale;
    int64_t token_stride, head_stride;
};

struct Problem {
    Side k, v;
    const int64_t* slots;  // [num_tokens]
    int64_t num_tokens, num_kv_heads, head_dim, block_size;
    int64_t block_stride;  // elements from a block of either cache to the next
    int64_t format, cache_format;
    int64_t scales_per_token;  // whether the scales are of the first shape
    int64_t threads;
};

// What rotates before it is stored; q_out [num_tokens, num_q_heads, head_dim], dense.
struct Rotation {
    const void* q;
    void* q_out;
    const int64_t* positions;
    const float* cos_sin_cache;  // [positions, rotary_dim]
    const float* k_offset;       // [segments, num_kv_heads, head_dim], taken off the rotated keys, or null
    const float* k_weight;       // as k_offset, of the squared errors of the keys' dimensions, or null
    const int64_t* token_positions;  // [num_tokens], in their sequences; with the two
    int64_t num_q_heads, token_stride, head_stride, rotary_dim;

    // Of one of the tables of segments.
    const float* row_of(const float* table, const Problem& p, int64_t t, int64_t head) const {
        return table ? table + (token_positions[t] / SEGMENT * p.num_kv_heads + head) * p.head_dim : nullptr;
    }
};

template <class Format>
constexpr float largest() {
    return std::is_same<Format, E4m3>::value ? 448.0f : std::is_same<Format, E5m2>::value ? 57344.0f : 127.0f;
}

int64_t whole_vectors(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The largest magnitude; NaN where there is one.
float absmax(const float* values, int64_t n) {
    constexpr int PARTS = 16;
    uint32_t parts[PARTS] = {};  // magnitudes as integers: their order is that of the floats, NaN on top
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int j = 0; j < PARTS; j++)
            parts[j] = std::max(parts[j], bit_cast<uint32_t>(values[i + j]) & 0x7fffffffu);
    for (int j = 0; i < n; i++, j++) parts[j] = std::max(parts[j], bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
    return bit_cast<float>(*std::max_element(parts, parts + PARTS));
}

// The values of a small float format nearest to v, as floats. Halfway cases may go either way in the last step.
template <class Format>
Vec nearest(Vec v) {
    constexpr int SHIFT = Format::SHIFT;
    constexpr float ALIGN = 1.5f * float(1 << (23 + 1 - Format::BIAS - (23 - SHIFT)));  // its last bit: the least subnormal
    constexpr float LEAST_NORMAL = 1.0f / (1 << (Format::BIAS - 1));
    IntVec bits = (IntVec)v;
    Vec rounded = (Vec)((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) & ~((1 << SHIFT) - 1));
    Vec subnormal = (v + ALIGN) - ALIGN;
    Vec magnitude = (Vec)(bits & 0x7fffffff);
    return magnitude < LEAST_NORMAL ? subnormal : rounded;
}

// Of the divisors least * 2^(i / 8), the one with the least squared error. A float format's steps grow with the value, so
// that a scale only decides where in a binade values fall; beyond a factor of 2 nothing new comes.
// values, weights: filled up with zeros to whole vectors.
template <class Format>
float best_divisor(const float* values, const float* weights, int64_t n, float least) {
    constexpr float STEPS[] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f,
                               1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};
    float best = least, best_error = std::numeric_limits<float>::infinity();
    for (float step : STEPS) {
        Vec inverse = splat(1.0f / (least * step)), errors{};
        for (int64_t i = 0; i < n; i += LANES) {
            Vec scaled = load_vec(values + i) * inverse;
            Vec error = scaled - nearest<Format>(scaled);
            errors += error * error * load_vec(weights + i);
        }
        float error = sum_lanes(errors) * step * step;
        if (error < best_error) best_error = error, best = least * step;
    }
    return best;
}

// What a vector is divided by so that the format holds its values well; NaN where there is one.
// values: with room for whole vectors.
template <class Format>
float divisor_of(float* values, const float* weights, int64_t n) {
    constexpr float LEAST = std::numeric_limits<float>::min();
    float highest = absmax(values, n) / largest<Format>(), divisor = highest < LEAST ? LEAST : highest;
    if constexpr (!std::is_same<Format, Int8>::value) {
        std::fill(values + n, values + whole_vectors(n), 0.0f);
        divisor = best_divisor<Format>(values, weights, n, divisor);
    }
    return divisor;
}

// The scale of a float format's codes of values over a divisor, by least squares: what is lost in rounding is not at
// right angles to the codes. Zeros and NaN keep the divisor. Filled up with zeros, like the above.
template <class Format>
float fitted_scale(const float* divided, const float* weights, int64_t n, float divisor) {
    Vec products{}, squares{};
    for (int64_t i = 0; i < n; i += LANES) {
        Vec value = load_vec(divided + i), code = nearest<Format>(value), weighted = code * load_vec(weights + i);
        products += weighted * value, squares += weighted * code;
    }
    float ratio = sum_lanes(products) / sum_lanes(squares);
    return ratio > 0 ? divisor * ratio : divisor;
}

// Divides by the scale where there is one, saturates and rounds. A token's scale is chosen and returned through
// `scale`, a static one is read. values, weights: with room for whole vectors.
template <class Format>
void encode(float* values, const float* weights, int64_t n, float* scale, bool is_per_token,
            typename Format::Storage* to) {
    if constexpr (sizeof(typename Format::Storage) == 1) {
        constexpr float LIMIT = largest<Format>();
        if (scale) {
            float divisor = is_per_token ? divisor_of<Format>(values, weights, n) : *scale;
            for (int64_t i = 0; i < n; i++) values[i] /= divisor;
            if (is_per_token) *scale = divisor;
        }
        for (int64_t i = 0; i < n; i++) {
            float low = values[i] < -LIMIT ? -LIMIT : values[i];  // NaN stays
            values[i] = low > LIMIT ? LIMIT : low;
        }
        if constexpr (!std::is_same<Format, Int8>::value)
            if (scale && is_per_token) *scale = fitted_scale<Format>(values, weights, n, *scale);
    }
    store_row<Format>(values, to, n);
}

template <class Format, class CacheFormat>
void store_head(const Problem& p, const Side& side, const typename Format::Storage* from, const float* offset,
                const float* weight, int64_t slot, int64_t head, float* scratch) {
    int64_t block = slot / p.block_size, row = head * p.block_size + slot % p.block_size;
    auto to = static_cast<typename CacheFormat::Storage*>(side.cache) + block * p.block_stride + row * p.head_dim;
    if constexpr (std::is_same<Format, CacheFormat>::value) {
        std::copy_n(from, p.head_dim, to);
    } else {
        int64_t place = p.scales_per_token ? block * p.num_kv_heads * p.block_size + row : head;
        float* scale = side.scale ? side.scale + place : nullptr;
        load_row<Format>(from, scratch, p.head_dim);
        if (offset)
            for (int64_t i = 0; i < p.head_dim; i++) scratch[i] -= offset[i];
        float* weights = scratch + whole_vectors(p.head_dim);
        std::fill_n(weights, whole_vectors(p.head_dim), 1.0f);
        if (weight) std::copy_n(weight, p.head_dim, weights);
        encode<CacheFormat>(scratch, weights, p.head_dim, scale, p.scales_per_token, to);
    }
}

template <class Format, class CacheFormat>
void store_token(const Problem& p, const Rotation* rotation, int64_t t, float* scratch,
                 typename Format::Storage* rotated) {
    using Storage = typename Format::Storage;
    const float* cos_sin = nullptr;
    if (rotation) {
        cos_sin = rotation->cos_sin_cache + rotation->positions[t] * rotation->rotary_dim;
        auto q = static_cast<const Storage*>(rotation->q) + t * rotation->token_stride;
        auto q_out = static_cast<Storage*>(rotation->q_out) + t * rotation->num_q_heads * p.head_dim;
        for (int64_t h = 0; h < rotation->num_q_heads; h++)
            rotate_head<Format>(q + h * rotation->head_stride, cos_sin, rotation->rotary_dim / 2, p.head_dim,
                                q_out + h * p.head_dim);
    }
    int64_t slot = p.slots[t];
    if (slot < 0) return;
    for (int64_t h = 0; h < p.num_kv_heads; h++) {
        auto k = static_cast<const Storage*>(p.k.values) + t * p.k.token_stride + h * p.k.head_stride;
        auto v = static_cast<const Storage*>(p.v.values) + t * p.v.token_stride + h * p.v.head_stride;
        const float *offset = nullptr, *weight = nullptr;
        if (rotation) {
            rotate_head<Format>(k, cos_sin, rotation->rotary_dim / 2, p.head_dim, rotated);
            k = rotated;
            offset = rotation->row_of(rotation->k_offset, p, t, h);
            weight = rotation->row_of(rotation->k_weight, p, t, h);
        }
        store_head<Format, CacheFormat>(p, p.k, k, offset, weight, slot, h, scratch);
        store_head<Format, CacheFormat>(p, p.v, v, nullptr, nullptr, slot, h, scratch);
    }
}

void run(const Problem& p, const Rotation* rotation) {
    int64_t heads = 2 * p.num_kv_heads + (rotation ? rotation->num_q_heads : 0);
    with_float_format(p.format, [&](auto f) {
        with_cache_format(p.cache_format, [&](auto c) {
            parallel_rows(p.num_tokens, heads * p.head_dim, p.threads, [&](int64_t first, int64_t last) {
                using Format = decltype(f);
                thread_local AlignedBuffer<float> scratch;
                thread_local AlignedBuffer<typename Format::Storage> rotated;
                float* values = scratch.at_least(size_t(2 * whole_vectors(p.head_dim)));
                auto* keys = rotated.at_least(size_t(p.head_dim));
                for (int64_t t = first; t < last; t++)
                    store_token<Format, decltype(c)>(p, rotation, t, values, keys);
            });
        });
    });
}

}  // namespace
}  // namespace batchinfer

extern "C" void kv_store(const batchinfer::Problem* problem) { batchinfer::run(*problem, nullptr); }

extern "C" void rotary_kv_store(const batchinfer::Problem* problem, const batchinfer::Rotation* rotation) {
    batchinfer::run(*problem, rotation);
}
