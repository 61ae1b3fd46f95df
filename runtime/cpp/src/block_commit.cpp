// Block commit: inner steps against a frozen cache, then one forward that writes the blocks.
#include <algorithm>
#include <map>
#include <string>

#include <mars/block_commit.hpp>
#include <mars/errors.hpp>

namespace mars {

namespace {

class BlockLoop : public Steps {
  public:
    BlockLoop(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id, std::int64_t cache_block)
        : batch_(backend, static_cast<std::int64_t>(rows.size()), mask_id), rows_(std::move(rows)), block_(block),
          cache_block_(cache_block) {}

    std::optional<std::vector<Accepted>> next() override {
        for (Row* row : rows_) row->refresh();
        for (; next_row_ < rows_.size(); ++next_row_)
            if (prefill(*rows_[next_row_])) return std::vector<Accepted>{};
        batch_.drop_finished();
        if (std::all_of(batch_.active.begin(), batch_.active.end(), [this](const Row* row) { return is_full(*row); })) {
            std::vector<Accepted> ended = commit();
            if (!ended.empty()) return ended;
        }
        if (batch_.active.empty()) return std::nullopt;
        return step();
    }

  private:
    /// Tokens in the row's present block; the last block before the end of the context is shorter, even empty.
    std::int64_t length(const Row& row) const { return std::min(cache_block_, batch_.backend.max_capacity() - row.cursor); }

    bool is_full(const Row& row) const { return row.num_pending() >= std::max(std::int64_t{1}, length(row)); }

    /// Put a chunk of the prompt into the cache; false after the last one.
    bool prefill(Row& row) {
        if (!prefill_clock_) {
            prefill_clock_.emplace();
            batch_.active.push_back(&row);
        }
        if (batch_.prefill(row)) return true;
        if (!row.finish_reason) write({&row});
        batch_.drop_finished();
        row.stats.prefill_time = prefill_clock_->seconds();
        prefill_clock_.reset();
        return false;
    }

    /// Make the pending tokens of neighbouring `rows` final and keep the prediction that follows each.
    void write(const std::vector<Row*>& rows) {
        std::vector<Window> windows;
        for (const Row* row : rows) windows.push_back({row->num_pending(), 0});
        const StepOutput& output = batch_.forward(batch_.index_of(*rows.front()), windows);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            Row& row = *rows[i];
            row.cursor += windows[i].known;
            ++row.stats.forwards;
            first_[row.index] = Predictions::of(output, static_cast<std::int64_t>(i), 1, row.config().metric);
        }
    }

    /// Write every full block into the cache; returns the rows that this ends, because their context is full.
    std::vector<Accepted> commit() {
        std::vector<Accepted> ended;
        for (Row* row : batch_.active)
            if (length(*row) == 0) ended.push_back(row->finish(FinishReason::capacity));
        batch_.drop_finished();
        if (!batch_.active.empty()) write(batch_.active);
        return ended;
    }

    /// One inner step for the rows whose block is not full; the others wait.
    std::vector<Accepted> step() {
        const auto size = static_cast<std::int64_t>(batch_.active.size());
        std::vector<std::int64_t> short_rows, fed;
        // A waiting row between two working ones feeds a scratch mask: the cursor does not move, nothing is kept.
        std::vector<Window> windows(batch_.active.size(), Window{0, 1});
        for (std::int64_t i = 0; i < size; ++i) {
            const Row& row = *batch_.active[static_cast<std::size_t>(i)];
            if (is_full(row)) continue;
            short_rows.push_back(i);
            if (window(row).slots() == 0) continue;
            windows[static_cast<std::size_t>(i)] = window(row);
            fed.push_back(i);
        }
        const StepOutput* output = nullptr;
        if (!fed.empty()) {
            for (const std::int64_t i : fed) ++batch_.active[static_cast<std::size_t>(i)]->stats.forwards;
            output = &batch_.forward(fed.front(), {windows.begin() + fed.front(), windows.begin() + fed.back() + 1});
        }
        std::vector<Accepted> accepted;
        for (const std::int64_t i : short_rows) {
            Row& row = *batch_.active[static_cast<std::size_t>(i)];
            accepted.push_back(row.take(predictions(row, window(row), output, i - (fed.empty() ? 0 : fed.front()))));
            clock(row);
        }
        return accepted;
    }

    /// What `row` may accept from: the step's predictions, preceded by the commit's one if it fed no known token.
    Predictions predictions(const Row& row, const Window& fed, const StepOutput* output, std::int64_t i) const {
        if (fed.slots() == 0) return first_.at(row.index);
        Predictions made = Predictions::of(*output, i, fed.outputs(), row.config().metric);
        return fed.known > 0 ? made : first_.at(row.index).then(made);
    }

    Window window(const Row& row) const {
        const std::int64_t known = row.num_pending();
        return {known, std::min(row.look_ahead(block_), std::max(std::int64_t{1}, length(row) - known)) - 1};
    }

    void clock(Row& row) const {
        const double elapsed = clock_.seconds();
        if (row.stats.time_to_first_token == 0) row.stats.time_to_first_token = elapsed;
        row.stats.decode_time = elapsed - row.stats.time_to_first_token;
    }

    Batch batch_;
    std::vector<Row*> rows_;
    std::int64_t block_, cache_block_;
    std::map<std::int64_t, Predictions> first_; // by row: the prediction that the last commit made for the block's first token
    std::size_t next_row_ = 0;                  // the first row whose prefill is not done
    std::optional<Stopwatch> prefill_clock_;    // runs while that row is being prefilled
    Stopwatch clock_;
};

} // namespace

std::unique_ptr<Steps> decode_blocks(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                                     std::int64_t cache_block) {
    if (const auto most = backend.max_slots(); most && cache_block > *most)
        throw SessionError("a cache block of " + std::to_string(cache_block) + " tokens does not fit a step of " + std::to_string(*most) +
                           " slots; give a smaller one");
    return std::make_unique<BlockLoop>(backend, std::move(rows), block, mask_id, cache_block);
}

} // namespace mars
