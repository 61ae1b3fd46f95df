// Cursor commit, and the batch that both cache loops step.
#include <algorithm>

#include <mars/decode.hpp>
#include <mars/policy.hpp>

namespace mars {

Batch::Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id)
    : backend(device), mask_id_(mask_id), cache_(device.new_cache(num_rows)) {}

const StepOutput& Batch::forward(std::int64_t first, const std::vector<Window>& windows) {
    input_.rows = static_cast<std::int64_t>(windows.size());
    input_.slots = 0;
    input_.outputs = 1;
    for (const Window& window : windows) {
        input_.slots = std::max(input_.slots, window.slots());
        input_.outputs = std::max(input_.outputs, window.outputs());
    }
    input_.input_ids.assign(static_cast<std::size_t>(input_.rows * input_.slots), mask_id_);
    input_.output_index.assign(static_cast<std::size_t>(input_.rows * input_.outputs), 0);
    input_.kv_length.clear();
    bool want_logits = false;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < input_.rows; ++i) {
        const Row& row = *active[static_cast<std::size_t>(first + i)];
        const Window& window = windows[static_cast<std::size_t>(i)];
        std::copy_n(row.tokens.begin() + row.cursor, window.known, input_.input_ids.begin() + i * input_.slots);
        const std::int64_t start = std::max(window.known - 1, std::int64_t{0});
        for (std::int64_t j = start; j < window.slots(); ++j)
            input_.output_index[static_cast<std::size_t>(i * input_.outputs + j - start)] = j;
        input_.kv_length.push_back(row.cursor);
        longest = std::max(longest, row.cursor);
        want_logits = want_logits || row.config().needs_logits();
    }
    cache_->reserve(longest + input_.slots);
    backend.step(*cache_, first, input_, want_logits, output_);
    return output_;
}

void Batch::drop_finished() {
    for (auto i = static_cast<std::int64_t>(active.size()) - 1; i >= 0; --i) {
        if (!active[static_cast<std::size_t>(i)]->finish_reason) continue;
        Row* last = active.back();
        active.pop_back();
        const auto end = static_cast<std::int64_t>(active.size());
        if (i < end) {
            cache_->move(end, i, last->cursor);
            active[static_cast<std::size_t>(i)] = last;
        }
    }
}

bool Batch::prefill(Row& row) {
    const std::int64_t chunk = std::min(prefill_chunk, backend.max_slots().value_or(prefill_chunk));
    if (row.num_pending() <= chunk || row.finish_reason) return false;
    forward(index_of(row), {Window{chunk, 0}});
    row.cursor += chunk;
    ++row.stats.prefill_forwards;
    return true;
}

std::int64_t Batch::index_of(const Row& row) const { return std::find(active.begin(), active.end(), &row) - active.begin(); }

namespace {

class CursorLoop : public Steps {
  public:
    CursorLoop(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id, std::shared_ptr<const Cost> cost)
        : batch_(backend, static_cast<std::int64_t>(rows.size()), mask_id), rows_(std::move(rows)), block_(block) {
        if (cost) policy_.emplace(std::move(cost));
    }

    std::optional<std::vector<Accepted>> next() override {
        for (Row* row : rows_) row->refresh();
        if (!prefill_clock_) batch_.drop_finished();
        for (; next_row_ < rows_.size(); ++next_row_, prefill_clock_.reset(), batch_.drop_finished()) {
            Row& row = *rows_[next_row_];
            if (!prefill_clock_) {
                prefill_clock_.emplace();
                batch_.active.push_back(&row);
            }
            if (batch_.prefill(row)) return std::vector<Accepted>{};
            if (row.finish_reason) continue;
            std::vector<Accepted> accepted{first_step(row)};
            prefill_clock_.reset();
            ++next_row_;
            return accepted;
        }
        if (batch_.active.empty()) return std::nullopt;
        std::vector<Accepted> accepted = step();
        for (Row* row : batch_.active) row->stats.decode_time = clock_.seconds() - row->stats.time_to_first_token;
        return accepted;
    }

  private:
    /// One forward over all active rows, and what each accepts.
    std::vector<Accepted> step() {
        std::vector<Accepted> accepted;
        for (Row* row : batch_.active)
            if (row->num_tokens() > batch_.backend.max_capacity()) accepted.push_back(row->finish(FinishReason::capacity));
        batch_.drop_finished();
        if (batch_.active.empty()) return accepted;
        std::vector<Window> windows;
        for (const Row* row : batch_.active) windows.push_back(window(*row));
        if (policy_) narrow(windows);
        const StepOutput& output = batch_.forward(0, windows);
        for (std::size_t i = 0; i < windows.size(); ++i)
            accepted.push_back(commit(*batch_.active[i], windows[i], output, static_cast<std::int64_t>(i)));
        return accepted;
    }

    Accepted first_step(Row& row) {
        const Window fed = window(row);
        Accepted accepted = commit(row, fed, batch_.forward(batch_.index_of(row), {fed}), 0);
        row.stats.prefill_time = prefill_clock_->seconds();
        row.stats.time_to_first_token = clock_.seconds();
        return accepted;
    }

    Window window(const Row& row) const {
        const std::int64_t known = row.num_pending();
        std::int64_t room = batch_.backend.max_capacity() - row.cursor - known;
        if (const auto most = batch_.backend.max_slots()) room = std::min(room, *most - known);
        return {known, std::max(std::int64_t{0}, std::min(row.look_ahead(block_) - 1, room))};
    }

    /// Leave each adaptive row the masks that are worth their time.
    void narrow(std::vector<Window>& windows) {
        std::vector<Chooser> rows;
        for (std::size_t i = 0; i < windows.size(); ++i)
            rows.push_back({&batch_.active[i]->acceptance, windows[i].known, windows[i].masks, batch_.active[i]->config().adaptive});
        const std::vector<std::int64_t> masks = policy_->masks(rows);
        for (std::size_t i = 0; i < windows.size(); ++i) windows[i].masks = masks[i];
    }

    static Accepted commit(Row& row, const Window& window, const StepOutput& output, std::int64_t i) {
        row.cursor += window.known;
        ++row.stats.forwards;
        return row.take(Predictions::of(output, i, window.masks + 1, row.config().metric));
    }

    Batch batch_;
    std::vector<Row*> rows_;
    std::int64_t block_;
    std::optional<Policy> policy_;
    std::size_t next_row_ = 0;               // the first row whose prefill is not done
    std::optional<Stopwatch> prefill_clock_; // runs while that row is being prefilled
    Stopwatch clock_;
};

} // namespace

std::unique_ptr<Steps> decode(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                              std::shared_ptr<const Cost> cost) {
    return std::make_unique<CursorLoop>(backend, std::move(rows), block, mask_id, std::move(cost));
}

} // namespace mars
