// Native paged attention: cuts a batch into tiles and spans of keys, and shares them among the threads.

#include <vector>

#include "products_bf16.h"
#include "products_float.h"
#include "sharing.h"

namespace batchinfer {
namespace {

constexpr int64_t PACKING_ROWS = 8;      // laying out a chunk of keys costs about as much as so many rows
constexpr int64_t LEAST_COST = 1 << 12;  // keys x rows that are worth another thread
constexpr int64_t MOST_BEGUN = 1 << 24;  // floats of softmaxes beyond which nothing more is shared
constexpr int64_t SHARES = 4;            // an item above 1 / SHARES of a thread's part is split by spans

// Spans [first, end) of one tile and KV head. A tile that is split keeps each span's softmax at `partial`, one after
// the other, until all are there.
struct Item {
    int64_t tile, kv_head, first_span, end_span, partial;
    bool is_split() const { return partial >= 0; }
};

// A tile over keys that several sequences share, and for each where the softmaxes of its spans go (Tile::begun).
struct SharedTile {
    Tile tile;
    std::vector<int64_t> tokens, begun;
};

int64_t most_queries(const Problem& p) { return std::max<int64_t>(1, TILE_ROWS / p.heads_per_kv()); }

std::vector<Tile> make_tiles(const Problem& p) {
    int64_t width = most_queries(p);
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
    Batch(const Problem& problem, const Layout<Math>& layout)
        : p_(problem), layout_(layout), tiles_(make_tiles(problem)) {
        int64_t total = 0;
        for (const Tile& tile : tiles_) total += cost_of(p_, tile) * p_.num_kv_heads;
        threads_ = std::max<int64_t>(1, std::min(p_.threads, total / LEAST_COST));
        split_above_ = threads_ > 1 ? total / (threads_ * SHARES) : std::numeric_limits<int64_t>::max();
        share_keys();
        std::stable_sort(tiles_.begin(), tiles_.end(),
                         [&](const Tile& a, const Tile& b) { return cost_of(p_, a) > cost_of(p_, b); });
        for (size_t t = 0; t < tiles_.size(); t++)
            for (int64_t head = 0; head < p_.num_kv_heads; head++) add_items(int64_t(t), head);
    }

    void run() {
        thread_local AlignedBuffer<float> memory;
        partials_ = memory.at_least(size_t(partial_size_));
        parallel_items(int64_t(shared_items_.size()), threads_, 1,
                       [&](int64_t i) { run_shared(shared_items_[size_t(i)]); });
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
    // Leaves the keys that sequences have in common to tiles of their own, one item a span and KV head.
    void share_keys() {
        std::vector<Tile*> tile_of(size_t(p_.num_seqs), nullptr);
        for (Tile& tile : tiles_) tile_of[size_t(tile.sequence)] = &tile;
        size_t width = size_t(most_queries(p_));
        if (width < 2) return;
        const Sharing sharing(p_);
        for (const SharedKeys& shared : sharing.groups()) {
            std::vector<Tile*> tiles;
            for (int64_t sequence : shared.sequences) {
                Tile rest = *tile_of[size_t(sequence)];
                rest.first_key = shared.num_keys;
                if (cost_of(p_, rest) <= split_above_) tiles.push_back(tile_of[size_t(sequence)]);  // else it is split
            }
            for (size_t first = 0; first + 1 < tiles.size() && partial_size_ < MOST_BEGUN; first += width) {
                size_t end = std::min(first + width, tiles.size());
                add_shared({tiles.begin() + first, tiles.begin() + end}, shared.num_keys);
            }
        }
    }

    void add_shared(const std::vector<Tile*>& tiles, int64_t num_keys) {
        SharedTile shared{{tiles[0]->sequence, 0, int64_t(tiles.size()), num_keys, 0, num_keys}, {}, {}};
        for (Tile* tile : tiles) {
            shared.tokens.push_back(tile->first_token), shared.begun.push_back(partial_size_);
            tile->first_key = num_keys, tile->begun = partial_size_;
            partial_size_ += p_.num_kv_heads * begun_size(*tile);
        }
        shared.tile.tokens = shared.tokens.data();
        for (int64_t span = 0; span < shared.tile.end_span(); span++)
            for (int64_t head = 0; head < p_.num_kv_heads; head++)
                shared_items_.push_back({int64_t(shared_.size()), head, span, span + 1, -1});
        shared_.push_back(std::move(shared));
    }

    void run_shared(const Item& item) {
        const SharedTile& shared = shared_[size_t(item.tile)];
        TileAttention<Math> attention(p_, layout_, shared.tile, item.kv_head);
        int64_t rows = p_.heads_per_kv(), width = attention.width();
        Softmax result = Softmax::at(result_memory(shared.tile), attention.rows(), width);
        result.clear(attention.rows(), width);
        attention.run(item.first_span, item.end_span, result, shared.tile.place(item.kv_head, item.first_span));
        int64_t place = (item.kv_head * shared.tile.end_span() + item.first_span) * Softmax::size(rows, width);
        for (size_t i = 0; i < shared.begun.size(); i++) {
            float* begun = partials_ + shared.begun[i] + place;
            result.copy_rows(int64_t(i) * rows, rows, width, Softmax::at(begun, rows, width));
        }
    }

    void add_items(int64_t t, int64_t head) {
        const Tile& tile = tiles_[size_t(t)];
        int64_t first = tile.first_span(), end = tile.end_span();
        if (end - first == 1 || tile.begun >= 0 || cost_of(p_, tile) <= split_above_)
            return items_.push_back({t, head, first, end, -1});
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
        float* memory = item.is_split() ? partials_ + item.partial : result_memory(tile);
        Softmax result = Softmax::at(memory, attention.rows(), attention.width());
        result.clear(attention.rows(), attention.width());
        attention.run(item.first_span, item.end_span, result, first_place(next), begun_of(tile, item.kv_head));
        if (!item.is_split()) attention.write(result);
    }

    float* begun_of(const Tile& tile, int64_t kv_head) const {
        return tile.begun < 0 ? nullptr : partials_ + tile.begun + kv_head * begun_size(tile);
    }

    // Floats of the softmaxes of a KV head over the keys before the tile's first.
    int64_t begun_size(const Tile& tile) const { return (tile.first_key + SPAN - 1) / SPAN * softmax_size(tile); }

    // The same sums in the same order as TileAttention::run over all spans.
    void finish(const Item& item) {
        const Tile& tile = tiles_[size_t(item.tile)];
        TileAttention<Math> attention(p_, layout_, tile, item.kv_head);
        int64_t rows = attention.rows(), width = attention.width(), partial = item.partial;
        Softmax result = Softmax::at(result_memory(tile), rows, width);
        result.clear(rows, width);
        for (int64_t span = item.first_span; span < item.end_span; span++, partial += softmax_size(tile))
            result.merge(Softmax::at(partials_ + partial, rows, width), rows, width);
        attention.write(result);
    }

    float* result_memory(const Tile& tile) const {
        thread_local AlignedBuffer<float> memory;
        return memory.at_least(size_t(softmax_size(tile)));
    }

    const Problem& p_;
    const Layout<Math> layout_;
    std::vector<Tile> tiles_;
    std::vector<SharedTile> shared_;
    std::vector<Item> items_, split_, shared_items_;
    float* partials_ = nullptr;
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
