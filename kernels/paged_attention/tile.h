// Attention of one tile of queries of one KV head: chunk by chunk over the keys, with a running softmax.
//
// Each row of a tile is computed by the same operations in the same order whatever rows stand beside it and wherever
// the tile begins: products run over the summed dimension in order, chunks and spans lie at fixed positions, and keys
// that a row does not see add exact zeros.
#pragma once

#include "attention.h"

namespace batchinfer {

constexpr float LOWEST = std::numeric_limits<float>::lowest();

// Neighbouring queries of a sequence.
struct Tile {
    int64_t sequence, first_token, num_queries;
    int64_t position;   // of the first query in its sequence
    int64_t first_key;  // first key that a query sees
    int64_t end_key;    // one past the last

    int64_t first_span() const { return first_key / SPAN; }
    int64_t end_span() const { return (end_key + SPAN - 1) / SPAN; }
};

// A softmax under way: per row the highest score, LANES partial sums of weights, and the weighted sum of values.
struct Softmax {
    float* best;      // [rows]
    float* total;     // [rows, LANES]
    float* weighted;  // [rows, padded head_dim]

    static int64_t size(int64_t rows, int64_t width) { return rows * (width + LANES + 1); }

    static Softmax at(float* memory, int64_t rows, int64_t width) {
        return {memory + rows * (width + LANES), memory + rows * width, memory};  // weighted first: it is aligned
    }

    void clear(int64_t rows, int64_t width) const {
        std::fill_n(weighted, rows * (width + LANES), 0.0f);
        std::fill_n(best, rows, LOWEST);
    }

    // Takes in the softmax over later keys. Into a cleared one that is a copy.
    void merge(const Softmax& later, int64_t rows, int64_t width) const {
        for (int64_t r = 0; r < rows; r++) {
            float highest = later.best[r] > best[r] ? later.best[r] : best[r];
            float keep = sum_of_exp(best[r] - highest), add = sum_of_exp(later.best[r] - highest);
            best[r] = highest;
            blend(total + r * LANES, later.total + r * LANES, LANES, keep, add);
            blend(weighted + r * width, later.weighted + r * width, width, keep, add);
        }
    }

   private:
    static float sum_of_exp(float x) { return exp_vec(splat(x))[0]; }
    static void blend(float* to, const float* from, int64_t n, float keep, float add) {
        for (int64_t i = 0; i < n; i++) to[i] = to[i] * keep + from[i] * add;
    }
};

// Splits a product into blocks of rows and groups of 16 columns that fit the registers.
template <class Math, int ROWS, int GROUPS>
void multiply_block(int64_t rows, int64_t groups, const Product<typename Math::Element>& p) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_block<Math, ROWS - 1, GROUPS>(rows, groups, p);
    }
    if constexpr (GROUPS > 1) {
        if (groups < GROUPS) return multiply_block<Math, ROWS, GROUPS - 1>(rows, groups, p);
    }
    Math::template multiply<ROWS, GROUPS>(p);
}

template <class Math>
void multiply_all(int64_t rows, int64_t groups, const Product<typename Math::Element>& p) {
    for (int64_t g = 0; g < groups; g += Math::MAX_GROUPS) {
        for (int64_t r = 0; r < rows; r += Math::MAX_ROWS) {
            Product<typename Math::Element> block = p;
            block.a += r * p.a_stride, block.b += g * 16, block.c += r * p.c_stride + g * 16;
            if (p.decay) block.decay += r;
            multiply_block<Math, Math::MAX_ROWS, Math::MAX_GROUPS>(rows - r, groups - g, block);
        }
    }
}

// How GROUP keys or values of a cache are laid out for Math's products.
template <class Math>
struct Layout {
    using Element = typename Math::Element;
    // to[head_dim, CHUNK] columns of keys; scratch [GROUP, padded head_dim]
    void (*pack_keys)(const char* const* rows, int64_t head_dim, Element* to, float* scratch);
    // to[GROUP, padded head_dim]
    void (*pack_values)(const char* const* rows, int64_t head_dim, Element* to);

    template <class Packer>
    static Layout of() {
        return {Packer::pack_keys, Packer::pack_values};
    }
};

// A chunk of keys of one sequence and KV head: those in [first_key, end_key).
struct Place {
    int64_t sequence, kv_head, first_key, end_key;

    static Place of(const Tile& tile, int64_t kv_head, int64_t span) {
        return {tile.sequence, kv_head, std::max(span * SPAN, tile.first_key), tile.end_key};
    }
};

template <class Math>
class TileAttention {
    using Element = typename Math::Element;

   public:
    TileAttention(const Problem& problem, const Layout<Math>& layout, const Tile& tile, int64_t kv_head)
        : p_(problem), layout_(layout), tile_(tile), head_(kv_head), rows_(tile.num_queries * problem.heads_per_kv()),
          width_(round_up(problem.head_dim, 16)), steps_(ceil_div(problem.head_dim)),
          row_bytes_(problem.head_dim * bytes_of(problem.cache_format)) {
        Memory& m = memory();
        queries_ = m.queries.at_least(rows_ * steps_);
        packed_ = m.packed.at_least(round_up(p_.head_dim, 64) * CHUNK);
        weights_ = m.weights.at_least(rows_ * CHUNK);
        scratch_ = m.scratch.at_least(GROUP * width_);
        scores_ = m.scores.at_least(rows_ * CHUNK);
        decay_ = m.decay.at_least(rows_);
        zeros_ = m.zero_row(p_.head_dim);
        load_queries();
    }

    // Attention over the keys of spans [first, end), into a cleared softmax.
    // `next` is what the thread probably does afterwards.
    void run(int64_t first, int64_t end, const Softmax& result, const Place& next) {
        locate(place(first), chunks_[0]);
        if (end - first == 1) return run_span(first, result, next);
        float* memory_of_span = memory().span.at_least(Softmax::size(rows_, width_));
        Softmax span = Softmax::at(memory_of_span, rows_, width_);
        for (int64_t s = first; s < end; s++) {
            span.clear(rows_, width_);
            run_span(s, span, s + 1 < end ? place(s + 1) : next);
            result.merge(span, rows_, width_);
        }
    }

    void write(const Softmax& result) {
        with_float_format(p_.q_format, [&](auto format) { write_as<decltype(format)>(result); });
    }

    int64_t rows() const { return rows_; }
    int64_t width() const { return width_; }

   private:
    struct Memory {
        AlignedBuffer<Element> queries, packed, weights;
        AlignedBuffer<float> scratch, scores, decay, span, zeros;

        const char* zero_row(int64_t head_dim) {
            float* row = zeros.at_least(head_dim);
            std::fill_n(row, head_dim, 0.0f);
            return reinterpret_cast<const char*>(row);
        }
    };

    static Memory& memory() {
        thread_local Memory memory;
        return memory;
    }

    static int64_t ceil_div(int64_t n) { return (n + Math::PER_ELEMENT - 1) / Math::PER_ELEMENT; }

    int64_t offset_of(int64_t row, int64_t token_stride, int64_t head_stride) const {
        int64_t group = p_.heads_per_kv();
        return (tile_.first_token + row / group) * token_stride + (head_ * group + row % group) * head_stride;
    }

    void load_queries() {
        with_float_format(p_.q_format, [&](auto format) {
            using Format = decltype(format);
            auto q = static_cast<const typename Format::Storage*>(p_.q);
            for (int64_t r = 0; r < rows_; r++) {
                load_row<Format>(q + offset_of(r, p_.q_token_stride, p_.q_head_stride), scratch_, p_.head_dim);
                Math::pack_query(scratch_, p_.head_dim, queries_ + r * steps_);
            }
        });
    }

    template <class Format>
    void write_as(const Softmax& result) {
        auto out = static_cast<typename Format::Storage*>(p_.out);
        for (int64_t r = 0; r < rows_; r++) {
            float total = sum_lanes(load_vec(result.total + r * LANES));
            float* values = result.weighted + r * width_;
            for (int64_t d = 0; d < p_.head_dim; d++) values[d] /= total;
            store_row<Format>(values, out + offset_of(r, p_.num_q_heads * p_.head_dim, p_.head_dim), p_.head_dim);
        }
    }

    Place place(int64_t span) const { return Place::of(tile_, head_, span); }

    // The first chunk is located already, and the one after the last when it returns. While a chunk is laid out, the
    // memory is asked for the next.
    void run_span(int64_t span, const Softmax& result, const Place& next) {
        int64_t first = std::max(span * SPAN, tile_.first_key / CHUNK * CHUNK);
        int64_t end = std::min((span + 1) * SPAN, tile_.end_key);
        for (int64_t key = first; key < end; key += CHUNK) {
            int groups = int((std::min<int64_t>(CHUNK, end - key) + GROUP - 1) / GROUP);
            int64_t following = key + CHUNK;
            locate(following < end ? Place{tile_.sequence, head_, following, tile_.end_key} : next, chunks_[1]);
            pack_keys(groups);
            multiply_all<Math>(rows_, groups, {queries_, steps_, packed_, CHUNK, steps_, scores_, CHUNK, nullptr});
            for (int64_t r = 0; r < rows_; r++) update_row(r, key, groups, result);
            pack_values(groups);
            int64_t steps = GROUP * groups / Math::PER_ELEMENT;
            multiply_all<Math>(rows_, width_ / GROUP, {weights_, CHUNK, packed_, round_up(p_.head_dim, 64), steps,
                                                       result.weighted, width_, decay_});
            std::swap(chunks_[0], chunks_[1]);
        }
    }

    void pack_keys(int groups) {
        for (int g = 0; g < CHUNK / GROUP; g++) {
            prefetch(chunks_[1].keys + g * GROUP);
            if (g < groups) layout_.pack_keys(chunks_[0].keys + g * GROUP, p_.head_dim, packed_ + g * GROUP, scratch_);
        }
    }

    void pack_values(int groups) {
        int64_t size = round_up(p_.head_dim, 64) * GROUP / Math::PER_ELEMENT;
        for (int g = 0; g < CHUNK / GROUP; g++) {
            prefetch(chunks_[1].values + g * GROUP);
            if (g < groups) layout_.pack_values(chunks_[0].values + g * GROUP, p_.head_dim, packed_ + g * size);
        }
    }

    void prefetch(const char* const* rows) const {
        for (int j = 0; j < GROUP; j++)
            for (int64_t i = 0; i < row_bytes_; i += 64) __builtin_prefetch(rows[j] + i, 0, 2);  // into the L2 cache
    }

    // Scores of one row and chunk to weights; the row's softmax moves on.
    void update_row(int64_t row, int64_t first_key, int groups, const Softmax& result) {
        float* scores = scores_ + row * CHUNK;
        int64_t position = tile_.position + row / p_.heads_per_kv();
        int64_t last = position - first_key;  // in the chunk
        int64_t first = p_.sliding_window ? last - p_.sliding_window + 1 : 0;
        Vec scale = splat(float(p_.scale)), best = splat(result.best[row]);
        int n = GROUP * groups;
        for (int j = 0; j < n; j += LANES) {
            Vec s = load_vec(scores + j) * scale;
            store_vec(scores + j, p_.k_scale ? s * load_vec(chunks_[0].key_scales + j) : s);
        }
        constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
        for (int64_t j = 0; j < std::min<int64_t>(first, n); j++) scores[j] = HIDDEN;
        for (int64_t j = std::max<int64_t>(last + 1, 0); j < n; j++) scores[j] = HIDDEN;
        for (int j = 0; j < n; j += LANES) best = max_vec(load_vec(scores + j), best);
        float highest = max_lanes(best);
        float decay = exp_vec(splat(result.best[row] - highest))[0];
        Vec total = load_vec(result.total + row * LANES) * decay;
        for (int j = 0; j < n; j += LANES) {
            Vec weight = exp_vec(load_vec(scores + j) - highest);
            total += weight;
            store_vec(scores + j, p_.v_scale ? weight * load_vec(chunks_[0].value_scales + j) : weight);
        }
        Math::pack_weights(scores, groups, weights_ + row * CHUNK);
        store_vec(result.total + row * LANES, total);
        result.best[row] = highest, decay_[row] = decay;
    }

    void locate(const Place& place, Chunk& chunk) const {
        std::fill_n(chunk.keys, CHUNK, zeros_), std::fill_n(chunk.values, CHUNK, zeros_);
        if (p_.k_scale) std::fill_n(chunk.key_scales, CHUNK, 0.0f);
        if (p_.v_scale) std::fill_n(chunk.value_scales, CHUNK, 0.0f);
        int64_t start = place.first_key / CHUNK * CHUNK, end = std::min(start + CHUNK, place.end_key);
        for (int64_t key = place.first_key; key < end;) {
            int64_t block = p_.block_table[place.sequence * p_.max_blocks + key / p_.block_size];
            int64_t offset = key % p_.block_size, run = std::min(p_.block_size - offset, end - key);
            int64_t index = (block * p_.num_kv_heads + place.kv_head) * p_.block_size + offset, at = key - start;
            for (int64_t i = 0; i < run; i++) {
                chunk.keys[at + i] = p_.k_cache + (index + i) * row_bytes_;
                chunk.values[at + i] = p_.v_cache + (index + i) * row_bytes_;
            }
            if (p_.k_scale) std::copy_n(p_.k_scale + index, run, chunk.key_scales + at);
            if (p_.v_scale) std::copy_n(p_.v_scale + index, run, chunk.value_scales + at);
            key += run;
        }
    }

    const Problem& p_;
    const Layout<Math> layout_;
    const Tile tile_;
    const int64_t head_, rows_, width_, steps_, row_bytes_;
    Element *queries_, *packed_, *weights_;  // [rows, steps], one chunk of keys or values, [rows, CHUNK]
    float *scratch_, *scores_, *decay_;      // [16, width], [rows, CHUNK], [rows]
    const char* zeros_;
    Chunk chunks_[2];  // the one at work and the next
};

}  // namespace batchinfer
