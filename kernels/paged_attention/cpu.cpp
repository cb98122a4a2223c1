// Native paged attention: cuts a batch into tiles and spans of keys, and shares them among the threads.

#include <vector>

#include "products_bf16.h"
#include "products_float.h"
#include "tile.h"

namespace batchinfer {
namespace {

constexpr int64_t PACKING_ROWS = 8;      // laying out a chunk of keys costs about as much as so many rows
constexpr int64_t LEAST_COST = 1 << 12;  // keys x rows that are worth another thread
constexpr int64_t SHARES = 4;            // an item above 1 / SHARES of a thread's part is split by spans

// Spans [first, end) of one tile and KV head. A tile that is split keeps each span's softmax at `partial`, one after
// the other, until all are there.
struct Item {
    int64_t tile, kv_head, first_span, end_span, partial;
    bool is_split() const { return partial >= 0; }
};

std::vector<Tile> make_tiles(const Problem& p) {
    int64_t width = std::max<int64_t>(1, TILE_ROWS / p.heads_per_kv());
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < p.num_seqs; s++) {
        int64_t first = p.cu_seqlens_q[s], num_queries = p.cu_seqlens_q[s + 1] - first;
        int64_t start = p.seq_lens[s] - num_queries;
        for (int64_t q = 0; q < num_queries; q += width) {
            int64_t count = std::min(width, num_queries - q), position = start + q;
            int64_t first_key = p.sliding_window ? std::max<int64_t>(0, position - p.sliding_window + 1) : 0;
            tiles.push_back({s, first + q, count, position, first_key, position + count});
        }
    }
    return tiles;
}

int64_t cost_of(const Problem& p, const Tile& tile) {
    return (tile.end_key - tile.first_key) * (tile.num_queries * p.heads_per_kv() + PACKING_ROWS);
}

template <class Math>
class Batch {
   public:
    Batch(const Problem& problem, const Layout<Math>& layout) : p_(problem), layout_(layout), tiles_(make_tiles(problem)) {
        std::stable_sort(tiles_.begin(), tiles_.end(),
                         [&](const Tile& a, const Tile& b) { return cost_of(p_, a) > cost_of(p_, b); });
        int64_t total = 0;
        for (const Tile& tile : tiles_) total += cost_of(p_, tile) * p_.num_kv_heads;
        threads_ = std::max<int64_t>(1, std::min(p_.threads, total / LEAST_COST));
        split_above_ = threads_ > 1 ? total / (threads_ * SHARES) : std::numeric_limits<int64_t>::max();
        for (size_t t = 0; t < tiles_.size(); t++)
            for (int64_t head = 0; head < p_.num_kv_heads; head++) add_items(int64_t(t), head);
    }

    void run() {
        partials_.resize(size_t(partial_size_));
        int64_t n = int64_t(items_.size());
        // a tile's heads lie side by side in the cache, so one thread takes them all where there are plenty
        int64_t grain = n >= threads_ * SHARES * p_.num_kv_heads ? p_.num_kv_heads : 1;
        parallel_items(n, threads_, grain, [&](int64_t i) {
            int64_t next = (i + 1) % grain ? i + 1 : i + 1 + (threads_ - 1) * grain;
            run_item(items_[size_t(i)], items_[size_t(std::min(next, n - 1))]);
        });
        parallel_items(int64_t(split_.size()), threads_, 1, [&](int64_t i) { finish(split_[size_t(i)]); });
    }

   private:
    void add_items(int64_t t, int64_t head) {
        const Tile& tile = tiles_[size_t(t)];
        int64_t first = tile.first_span(), end = tile.end_span();
        if (end - first == 1 || cost_of(p_, tile) <= split_above_) return items_.push_back({t, head, first, end, -1});
        split_.push_back({t, head, first, end, partial_size_});
        for (int64_t span = first; span < end; span++) {
            items_.push_back({t, head, span, span + 1, partial_size_});
            partial_size_ += softmax_size(tile);
        }
    }

    int64_t softmax_size(const Tile& tile) const {
        return Softmax::size(tile.num_queries * p_.heads_per_kv(), round_up(p_.head_dim, 16));
    }

    Place first_place(const Item& item) const {
        return tiles_[size_t(item.tile)].place(item.kv_head, item.first_span);
    }

    void run_item(const Item& item, const Item& next) {
        const Tile& tile = tiles_[size_t(item.tile)];
        TileAttention<Math> attention(p_, layout_, tile, item.kv_head);
        float* memory = item.is_split() ? partials_.data() + item.partial : result_memory(tile);
        Softmax result = Softmax::at(memory, attention.rows(), attention.width());
        result.clear(attention.rows(), attention.width());
        attention.run(item.first_span, item.end_span, result, first_place(next));
        if (!item.is_split()) attention.write(result);
    }

    // The same sums in the same order as TileAttention::run over all spans.
    void finish(const Item& item) {
        const Tile& tile = tiles_[size_t(item.tile)];
        TileAttention<Math> attention(p_, layout_, tile, item.kv_head);
        int64_t rows = attention.rows(), width = attention.width(), partial = item.partial;
        Softmax result = Softmax::at(result_memory(tile), rows, width);
        result.clear(rows, width);
        for (int64_t span = item.first_span; span < item.end_span; span++, partial += softmax_size(tile))
            result.merge(Softmax::at(partials_.data() + partial, rows, width), rows, width);
        attention.write(result);
    }

    float* result_memory(const Tile& tile) const {
        thread_local AlignedBuffer<float> memory;
        return memory.at_least(size_t(softmax_size(tile)));
    }

    const Problem& p_;
    const Layout<Math> layout_;
    std::vector<Tile> tiles_;
    std::vector<Item> items_, split_;
    std::vector<float> partials_;
    int64_t partial_size_ = 0, threads_ = 1, split_above_ = 0;
};

#if BATCHINFER_BF16_PRODUCTS
// Whether the batch was done: bf16 queries over a cache whose values bf16 holds exactly.
bool run_in_bf16(const Problem& p) {
    using Layout = batchinfer::Layout<Bf16Math>;
    if (p.q_format != BF16 || p.cache_format == FP32 || p.cache_format == FP16) return false;
    Layout layout = p.cache_format == BF16   ? Layout::of<Bf16Layout<Bf16Codes>>()
                    : p.cache_format == E4M3 ? Layout::of<Bf16Layout<ByteCodes<E4m3>>>()
                    : p.cache_format == E5M2 ? Layout::of<Bf16Layout<ByteCodes<E5m2>>>()
                                             : Layout::of<Bf16Layout<ByteCodes<Int8>>>();
    Batch<Bf16Math>(p, layout).run();
    return true;
}
#else
bool run_in_bf16(const Problem&) { return false; }
#endif

void run_in_float(const Problem& p) {
    Layout<FloatMath> layout;
    with_cache_format(p.cache_format,
                      [&](auto format) { layout = Layout<FloatMath>::of<FloatLayout<decltype(format)>>(); });
    Batch<FloatMath>(p, layout).run();
}

}  // namespace
}  // namespace batchinfer

extern "C" void paged_attention(const batchinfer::Problem* problem) {
    using namespace batchinfer;
    if (!run_in_bf16(*problem)) run_in_float(*problem);
}
