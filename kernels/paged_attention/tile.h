// Attention of one tile of queries of one KV head: chunk by chunk over the keys, with a running softmax.
//
// Each row of a tile is computed by the same operations in the same order whatever rows stand beside it and wherever
// the tile begins: products run over the summed dimension in order, chunks and spans lie at fixed positions, and keys
// that a row does not see add exact zeros or are left out.
#pragma once

#include "layout.h"
#include "softmax.h"

namespace batchinfer {

// Neighbouring queries of a sequence, or a query each of several sequences that have these keys in common.
struct Tile {
    int64_t sequence, first_token, num_queries;
    int64_t position;   // of the first query in its sequence
    int64_t first_key;  // where to begin: the first key that a query sees, or the first after those in `begun`
    int64_t end_key;    // one past the last
    const int64_t* tokens = nullptr;  // of the queries, where they do not follow first_token
    int64_t begun = -1;  // where the softmaxes over the keys before first_key lie; -1: there are none

    int64_t first_span() const { return first_key / SPAN; }
    int64_t end_span() const { return (end_key + SPAN - 1) / SPAN; }
    int64_t token(int64_t query) const { return tokens ? tokens[query] : first_token + query; }
    Place place(int64_t kv_head, int64_t span) const {
        return {sequence, kv_head, std::max(span * SPAN, first_key), end_key};
    }
};

template <class Math>
class TileAttention {
    using Element = typename Math::Element;
    static constexpr int64_t SEGMENTS = SPAN / SEGMENT;  // of a span
    static constexpr int PART = 4;  // groups that are laid out together where there is one block of rows

   public:
    TileAttention(const Problem& problem, const Layout<Math>& layout, const Tile& tile, int64_t kv_head)
        : p_(problem), layout_(layout), tile_(tile), head_(kv_head), group_(problem.heads_per_kv()),
          rows_(tile.num_queries * group_), width_(round_up(problem.head_dim, 16)),
          steps_(elements_of(problem.head_dim)), values_stride_(round_up(problem.head_dim, 64)), memory_(memory()) {
        queries_ = memory_.queries.at_least(size_t(rows_ * steps_));
        keys_ = memory_.keys.at_least(size_t(values_stride_ * CHUNK));
        values_ = memory_.values.at_least(size_t(values_stride_ * CHUNK));
        scratch_ = memory_.scratch.at_least(size_t(GROUP * width_));
        if (p_.k_offset && tile_.end_key > SEGMENT) bias_ = memory_.bias.at_least(size_t(rows_ * SEGMENTS));
        memory_.factors.set_scales(p_, head_);
        for (int64_t r = 0; r < rows_; r++)
            Math::load_query(p_, offset_of(r, p_.q_token_stride, p_.q_head_stride), queries_ + r * steps_);
    }

    // Attention over the keys of spans [first, end), into a cleared softmax. begun: the softmaxes of the spans before
    // first_key, the last of them unfinished where it lies within a span; or null.
    // `next` is what the thread probably does afterwards.
    void run(int64_t first, int64_t end, const Softmax& result, const Place& next, float* begun = nullptr) {
        now_->locate(p_, tile_.place(head_, first));
        if (end - first == 1 && !begun) return run_span(first, result, next);
        int64_t size = Softmax::size(rows_, width_);
        for (int64_t s = 0; begun && s < first; s++)
            result.merge(Softmax::at(begun + s * size, rows_, width_), rows_, width_);
        float* own = memory_.span.at_least(size_t(size));
        for (int64_t s = first; s < end; s++) {
            bool goes_on = begun && s == first && tile_.first_key % SPAN;
            Softmax span = Softmax::at(goes_on ? begun + s * size : own, rows_, width_);
            if (!goes_on) span.clear(rows_, width_);
            run_span(s, span, s + 1 < end ? tile_.place(head_, s + 1) : next);
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
        AlignedBuffer<Element> queries, keys, values;
        AlignedBuffer<float> scratch, span, offsets, bias;
        ScoreBlock<Math> block;
        float ones[Math::MAX_ROWS];
        Memory() { std::fill_n(ones, Math::MAX_ROWS, 1.0f); }
        Factors factors;
        Chunk chunks[2];
    };

    static Memory& memory() {
        thread_local Memory memory;
        return memory;
    }

    static int64_t elements_of(int64_t n) { return (n + Math::PER_ELEMENT - 1) / Math::PER_ELEMENT; }

    int64_t offset_of(int64_t row, int64_t token_stride, int64_t head_stride) const {
        return tile_.token(row / group_) * token_stride + (head_ * group_ + row % group_) * head_stride;
    }

    template <class Format>
    void write_as(const Softmax& result) {
        auto out = static_cast<typename Format::Storage*>(p_.out);
        float factor = p_.static_value_scale(head_);
        for (int64_t r = 0; r < rows_; r++) {
            auto ratio = result.ratio(r, factor, p_.sinks ? p_.sinks + head_ * group_ + r % group_ : nullptr);
            float* values = result.weighted + r * width_;
            for (int64_t d = 0; d < p_.head_dim; d++) values[d] = values[d] * ratio.factor / ratio.divisor;
            store_row<Format>(values, out + offset_of(r, p_.num_q_heads * p_.head_dim, p_.head_dim), p_.head_dim);
        }
    }

    // The first chunk is located already, and the one after the last when it returns. While a chunk is multiplied, the
    // memory is asked for the next.
    void run_span(int64_t span, const Softmax& result, const Place& next) {
        int64_t first = std::max(span * SPAN, tile_.first_key / CHUNK * CHUNK);
        if (bias_) load_bias(span);
        int64_t end = std::min((span + 1) * SPAN, tile_.end_key);
        for (int64_t key = first; key < end; key += CHUNK) {
            int groups = int((std::min<int64_t>(CHUNK, end - key) + GROUP - 1) / GROUP);
            int64_t following = key + CHUNK;
            next_->locate(p_, following < end ? Place{tile_.sequence, head_, following, tile_.end_key} : next);
            if (p_.scales_per_token) load_factors();
            attend(key, groups, result);
            std::swap(now_, next_);
        }
    }

    // Products of the queries and what a span's keys lack beyond what those of segment 0 do, which adds one number to all
    // scores of a query and so nothing to its softmax. In the unit of weigh's scores.
    void load_bias(int64_t span) {
        float* offsets = memory_.offsets.at_least(size_t((SEGMENTS + 1) * width_));
        float* query = offsets + SEGMENTS * width_;
        std::fill_n(offsets, (SEGMENTS + 1) * width_, 0.0f);
        const float* start = p_.k_offset + head_ * p_.head_dim;
        int64_t segments = std::min(SEGMENTS, (tile_.end_key - span * SPAN + SEGMENT - 1) / SEGMENT);
        for (int64_t s = 0; s < segments; s++) {
            const float* offset = start + (span * SEGMENTS + s) * p_.num_kv_heads * p_.head_dim;
            for (int64_t d = 0; d < p_.head_dim; d++) offsets[s * width_ + d] = offset[d] - start[d];
        }
        for (int64_t r = 0; r < rows_; r++) {
            load_query(p_, offset_of(r, p_.q_token_stride, p_.q_head_stride), query);
            for (int64_t s = 0; s < SEGMENTS; s++) {
                Vec sum{};
                for (int64_t d = 0; d < width_; d += LANES) sum += load_vec(query + d) * load_vec(offsets + s * width_ + d);
                bias_[r * SEGMENTS + s] = sum_lanes(sum) * memory_.factors.base;
            }
        }
    }

    float bias_of(int64_t row, int64_t key) const {
        return bias_ ? bias_[row * SEGMENTS + key % SPAN / SEGMENT] : 0.0f;
    }

    void load_factors() {
        for (int g = 0; g < CHUNK / GROUP; g++) {
            const Group &group = now_->groups[g], &later = next_->groups[g];
            __builtin_prefetch(later.key_scales, 0, 2), __builtin_prefetch(later.value_scales, 0, 2);
            memory_.factors.load_group(g, group.key_scales, group.value_scales, group.count);
        }
    }

    void lay_out_keys(int first, int end) {
        for (int g = first; g < end; g++)
            layout_.pack_keys(now_->groups[g], p_.head_dim, keys_ + g * GROUP, scratch_);
    }

    void lay_out_values(int first, int end) {
        int64_t size = values_stride_ * GROUP / Math::PER_ELEMENT;
        for (int g = first; g < end; g++)
            layout_.pack_values(now_->groups[g], p_.head_dim, values_ + g * size);
    }

    // For a single block keys and values are laid out a part at a time, between the products: what is asked for of the
    // next chunk spreads over more time.
    void attend(int64_t key, int groups, const Softmax& result) {
        Ahead keys, values;
        for (const Group& group : next_->groups)
            keys.add(group.keys, GROUP * p_.row_bytes()), values.add(group.values, GROUP * p_.row_bytes());
        if (rows_ > Math::MAX_ROWS) lay_out_keys(0, groups), lay_out_values(0, groups);
        for (int64_t r = 0; r < rows_; r += Math::MAX_ROWS) attend_block(r, key, groups, result, keys, values);
        keys.rest(), values.rest();
    }

    // The rows of one block of the products, from r on, over one chunk.
    void attend_block(int64_t r, int64_t key, int groups, const Softmax& result, Ahead& keys, Ahead& values) {
        Memory& m = memory_;
        const bool is_single = rows_ <= Math::MAX_ROWS;
        int64_t rows = std::min<int64_t>(Math::MAX_ROWS, rows_ - r);
        Sight last = sight_of(r + rows - 1, key);
        if (last.last < 0 || sight_of(r, key).first >= CHUNK) return;
        int seen = std::min(groups, last.last / GROUP + 1), part = is_single ? PART : seen;
        for (int g = 0; g < seen; g += part) {
            int end = std::min(g + part, seen);
            if (is_single) lay_out_keys(g, end);
            multiply_rows<Math>(rows, end - g, {queries_ + r * steps_, steps_, keys_ + g * GROUP, CHUNK, steps_,
                                                m.block.scores + g * GROUP, CHUNK, nullptr, &keys});
        }
        weigh(r, rows, key, seen, result);
        for (int g = 0; g < seen; g += part) {
            int end = std::min(g + part, seen);
            if (is_single) lay_out_values(g, end);
            multiply_rows<Math>(rows, width_ / GROUP,
                                {m.block.weights + g * GROUP / Math::PER_ELEMENT, CHUNK / Math::PER_ELEMENT,
                                 values_ + g * values_stride_ * GROUP / Math::PER_ELEMENT, values_stride_,
                                 (end - g) * GROUP / Math::PER_ELEMENT, result.weighted + r * width_, width_,
                                 g ? m.ones : m.block.decay, &values});
        }
    }

    void weigh(int64_t r, int64_t rows, int64_t key, int groups, const Softmax& result) {
        ScoreBlock<Math>& block = memory_.block;
        for (int64_t i = 0; i < rows; i++)
            block.sight[i] = sight_of(r + i, key), block.bias[i] = bias_of(r + i, key);
        block.weigh(rows, groups * GROUP, memory_.factors, result.best + r, result.total + r * LANES);
    }

    Sight sight_of(int64_t row, int64_t key) const {
        int64_t last = tile_.position + row / group_ - key;
        int64_t first = p_.sliding_window ? last - p_.sliding_window + 1 : 0;
        return {int(std::min<int64_t>(first, CHUNK)), int(std::min<int64_t>(last, CHUNK))};
    }

    const Problem& p_;
    const Layout<Math> layout_;
    const Tile tile_;
    const int64_t head_, group_, rows_, width_, steps_, values_stride_;
    Memory& memory_;
    Element *queries_, *keys_, *values_;  // [rows, steps]; one chunk, laid out
    float* scratch_;                      // [GROUP, width]
    float* bias_ = nullptr;  // of a span's scores, [rows, SEGMENTS]; null where all keys are of segment 0
    Chunk *now_ = &memory_.chunks[0], *next_ = &memory_.chunks[1];
};

}  // namespace batchinfer
