// Block commit: whole blocks are committed (runtime/decode/blocks.py).
#include <algorithm>
#include <map>
#include <string>

#include <mars/errors.hpp>

#include "decode/schedule.hpp"

namespace mars {

namespace {

/// The same loop with another way to commit: cursors move when whole blocks are full.
class BlockSchedule : public Schedule {
  public:
    BlockSchedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t num_rows, std::int64_t cache_block)
        : Schedule(backend, block, mask_id, prefill_chunk, KvBudget{num_rows}), cache_block_(cache_block) {}

  private:
    /// Length of the row's current block. The last block before the end of the context is shorter, or empty.
    std::int64_t length(const Row& row) const { return std::min(cache_block_, backend_.max_capacity() - row.cursor); }

    bool is_full(const Row& row) const { return row.num_pending() >= std::max(std::int64_t{1}, length(row)); }

    Feed first_feed(Row& row) override { return {row.num_pending(), 0, 0}; }

    /// A commit: the pending tokens are final, and the prediction after them is kept.
    std::optional<Accepted> finish_prompt(Row& row, const Predictions& predictions, const Feed& feed) override {
        row.cursor += feed.pending;
        ++row.stats.forwards;
        first_[row.index] = predictions;
        return std::nullopt;
    }

    void decode(std::vector<Row*> rows, Events& events) override {
        if (std::all_of(rows.begin(), rows.end(), [this](const Row* row) { return is_full(*row); }))
            commit(rows, events);
        else
            fill(rows, events);
    }

    /// Write all full blocks into the cache. Rows whose context is full end.
    void commit(std::vector<Row*> rows, Events& events) {
        for (Row* row : rows)
            if (length(*row) == 0) events.push_back(row->finish(FinishReason::capacity));
        drop_finished(events);
        rows = decoding();
        if (rows.empty()) return;
        std::vector<Feed> feeds;
        for (Row* row : rows) feeds.push_back(first_feed(*row));
        run(
            rows, feeds, [this](Row& row, const Predictions& predictions, const Feed& fed) { return finish_prompt(row, predictions, fed); },
            events);
    }

    /// One inner step for the rows whose block is not full; the others wait.
    void fill(const std::vector<Row*>& rows, Events& events) {
        // A waiting row between two working ones feeds one mask that is discarded: its cursor does not move.
        std::vector<Feed> feeds(rows.size(), Feed{0, 0, 1});
        std::vector<std::size_t> working;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (is_full(*rows[i])) continue;
            const Feed inner = inner_feed(*rows[i]);
            if (inner.slots() == 0) { // the commit predicted its only token
                events.push_back(*rows[i]->accept(first_.at(rows[i]->index), 0));
                continue;
            }
            feeds[i] = inner;
            working.push_back(i);
        }
        if (working.empty()) return;
        const std::vector<Row*> span(&rows[working.front()], &rows[working.back()] + 1);
        const std::vector<Feed> fed(&feeds[working.front()], &feeds[working.back()] + 1);
        const auto take_inner = [&](Row& row, const Predictions& predictions, const Feed& feed) -> std::optional<Accepted> {
            const auto is_row = [&](std::size_t i) { return rows[i] == &row; };
            if (std::none_of(working.begin(), working.end(), is_row)) return std::nullopt;
            ++row.stats.forwards;
            return row.accept(feed.pending > 0 ? predictions : first_.at(row.index).then(predictions), 0);
        };
        run(span, fed, take_inner, events);
        std::stable_sort(events.begin(), events.end(), [](const Accepted& a, const Accepted& b) { return a.row < b.row; });
    }

    Feed inner_feed(const Row& row) const {
        const std::int64_t pending = row.num_pending();
        return {pending, 0, std::min(row.max_masks(block_), std::max(std::int64_t{1}, length(row) - pending) - 1)};
    }

    const std::int64_t cache_block_;
    std::map<std::int64_t, Predictions> first_; // by row: the last commit's prediction for the block's first token
};

} // namespace

std::unique_ptr<Run> decode_blocks(Backend& backend, const std::vector<Row*>& rows, std::int64_t block, std::int64_t mask_id,
                                   std::int64_t cache_block) {
    if (const auto most = backend.max_slots(); most && cache_block > *most)
        throw SessionError("a cache block of " + std::to_string(cache_block) + " tokens does not fit a step of " + std::to_string(*most) +
                           " slots; give a smaller one");
    if (std::any_of(rows.begin(), rows.end(), [](const Row* row) { return row->config().is_exact(); }))
        throw SessionError("exact mode needs cursor commit: block commit feeds accepted tokens against a frozen cache and verifies none;"
                           " leave commit as it is, or give a tau");
    auto schedule = std::make_unique<BlockSchedule>(backend, block, mask_id, static_cast<std::int64_t>(rows.size()), cache_block);
    return std::make_unique<Run>(std::move(schedule), rows);
}

} // namespace mars
