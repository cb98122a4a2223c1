// Which sequences of a batch begin with the same blocks, so that one pass over those keys serves the new tokens of all.
//
// Sorted by block table, sequences with a common beginning are neighbours, and what several neighbours have in common
// is the least that any two side by side have: a tree of runs. Each run is either one group, over what all its
// sequences have in common, or several within it, whichever saves more keys.
#pragma once

#include <algorithm>
#include <vector>

#include "tile.h"

namespace batchinfer {

// Sequences with one new token each, and how many of their first keys are the same; a multiple of CHUNK.
struct SharedKeys {
    std::vector<int64_t> sequences;
    int64_t num_keys;
};

class Sharing {
   public:
    explicit Sharing(const Problem& p) : p_(p) {
        if (p_.sliding_window) return;  // the first keys are out of sight soon
        for (int64_t s = 0; s < p_.num_seqs; s++)
            if (p_.cu_seqlens_q[s + 1] - p_.cu_seqlens_q[s] == 1 && p_.seq_lens[s] > CHUNK) order_.push_back(s);
        std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
            const int32_t *x = blocks_of(a), *y = blocks_of(b);
            return std::lexicographical_compare(x, x + num_blocks(a), y, y + num_blocks(b));
        });
        for (size_t i = 1; i < order_.size(); i++) common_.push_back(keys_in_common(order_[i - 1], order_[i]));
        split(0, int64_t(order_.size()));
    }

    const std::vector<SharedKeys>& groups() const { return groups_; }

   private:
    const int32_t* blocks_of(int64_t s) const { return p_.block_table + s * p_.max_blocks; }

    // Whole blocks before a sequence's last token, which is its own.
    int64_t num_blocks(int64_t s) const { return (p_.seq_lens[s] - 1) / p_.block_size; }

    int64_t keys_in_common(int64_t a, int64_t b) const {
        const int32_t* first = blocks_of(a);
        auto differ = std::mismatch(first, first + std::min(num_blocks(a), num_blocks(b)), blocks_of(b));
        return (differ.first - first) * p_.block_size / CHUNK * CHUNK;
    }

    // Appends the best groups of the sequences in places [first, end) and returns how many keys they save.
    int64_t split(int64_t first, int64_t end) {
        if (end - first < 2) return 0;
        int64_t least = *std::min_element(common_.begin() + first, common_.begin() + end - 1);
        int64_t together = least * (end - first - 1), apart = 0, place = first;
        size_t before = groups_.size();
        for (int64_t i = first; i < end; i++)
            if (i == end - 1 || common_[size_t(i)] == least) apart += split(place, i + 1), place = i + 1;
        if (together == 0 || together < apart) return apart;
        groups_.resize(before);
        groups_.push_back({{order_.begin() + first, order_.begin() + end}, least});
        return together;
    }

    const Problem& p_;
    std::vector<int64_t> order_, common_;  // sequences; keys in common of each and the next
    std::vector<SharedKeys> groups_;
};

}  // namespace batchinfer
