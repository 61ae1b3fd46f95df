#include "decode/blocks.hpp"

#include <algorithm>
#include <map>
#include <string>

#include <mars/errors.hpp>

namespace mars {

namespace {

class BlockCommit : public Schedule {
  public:
    BlockCommit(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id, std::int64_t cache_block)
        : Schedule(backend, std::move(rows), block, mask_id), cache_block_(cache_block) {}

  private:
    /// Write the whole prompt; its last prediction is kept for the first block.
    std::optional<Accepted> begin(Row& row) override {
        write({&row});
        return std::nullopt;
    }

    std::vector<Accepted> step() override {
        if (std::all_of(batch_.active.begin(), batch_.active.end(), [this](const Row* row) { return is_full(*row); })) {
            std::vector<Accepted> ended = commit();
            if (!ended.empty()) return ended;
        }
        return fill();
    }

    /// Length of the row's current block. The last block before the end of the context is shorter, or empty.
    std::int64_t length(const Row& row) const { return std::min(cache_block_, max_capacity() - row.cursor); }

    bool is_full(const Row& row) const { return row.num_pending() >= std::max(std::int64_t{1}, length(row)); }

    /// Make the pending tokens of neighbouring `rows` final and keep the prediction after each.
    void write(const std::vector<Row*>& rows) {
        std::vector<Feed> feeds;
        for (const Row* row : rows) feeds.push_back({row->num_pending(), 0, 0});
        std::vector<Predictions> made = batch_.step(batch_.index_of(*rows.front()), feeds, Keep::known);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            Batch::moved(*rows[i]);
            ++rows[i]->stats.forwards;
            first_[rows[i]->index] = std::move(made[i]);
        }
    }

    /// Write all full blocks into the cache; returns events for rows that end because their context is full.
    std::vector<Accepted> commit() {
        std::vector<Accepted> ended;
        for (Row* row : batch_.active)
            if (length(*row) == 0) ended.push_back(row->finish(FinishReason::capacity));
        batch_.drop_finished();
        if (!batch_.active.empty()) write(batch_.active);
        return ended;
    }

    /// One inner step for the rows whose block is not full; the others wait.
    std::vector<Accepted> fill() {
        // A waiting row between two working ones feeds one mask that is discarded: its cursor does not move.
        std::vector<Feed> feeds(batch_.active.size(), Feed{0, 0, 1});
        std::vector<std::size_t> working, fed;
        for (std::size_t i = 0; i < feeds.size(); ++i) {
            Row& row = *batch_.active[i];
            if (is_full(row)) continue;
            working.push_back(i);
            const Feed own = feed(row);
            if (own.slots() == 0) continue;
            feeds[i] = own;
            fed.push_back(i);
            ++row.stats.forwards;
        }
        const std::size_t first = fed.empty() ? 0 : fed.front();
        feeds = fed.empty() ? std::vector<Feed>{} : std::vector<Feed>(&feeds[first], &feeds[fed.back()] + 1);
        const std::vector<Predictions> made = batch_.step(static_cast<std::int64_t>(first), feeds, Keep::nothing);
        std::vector<Accepted> accepted;
        for (const std::size_t i : working) {
            Row& row = *batch_.active[i];
            const Feed own = feed(row);
            if (own.slots() == 0) // the commit's prediction is the only one
                accepted.push_back(*row.accept(first_.at(row.index), 0));
            else // if no pending token was fed, the commit's prediction comes first
                accepted.push_back(*row.accept(own.known > 0 ? made[i - first] : first_.at(row.index).then(made[i - first]), 0));
        }
        return accepted;
    }

    Feed feed(const Row& row) const {
        const std::int64_t known = row.num_pending();
        return {known, 0, std::min(row.most_masks(block_), std::max(std::int64_t{1}, length(row) - known) - 1)};
    }

    std::int64_t cache_block_;
    std::map<std::int64_t, Predictions> first_; // by row: the last commit's prediction for the block's first token
};

} // namespace

std::unique_ptr<Schedule> decode_blocks(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                                        std::int64_t cache_block) {
    if (const auto most = backend.max_slots(); most && cache_block > *most)
        throw SessionError("a cache block of " + std::to_string(cache_block) + " tokens does not fit a step of " + std::to_string(*most) +
                           " slots; give a smaller one");
    if (std::any_of(rows.begin(), rows.end(), [](const Row* row) { return row->config().is_exact(); }))
        throw SessionError("exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and verifies none;"
                           " leave commit as it is, or give a tau");
    return std::make_unique<BlockCommit>(backend, std::move(rows), block, mask_id, cache_block);
}

} // namespace mars
