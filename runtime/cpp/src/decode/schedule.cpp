#include "decode/schedule.hpp"

#include <algorithm>

namespace mars {

Schedule::Schedule(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id)
    : batch_(backend, static_cast<std::int64_t>(rows.size()), mask_id), block_(block), rows_(std::move(rows)) {}

std::optional<std::vector<Accepted>> Schedule::next() {
    try {
        return advance();
    } catch (const Interrupted&) { // a device stops a forward only after all its rows were asked to end
        for (Row* row : rows_) row->refresh();
        if (!std::all_of(rows_.begin(), rows_.end(), [](const Row* row) { return row->finish_reason.has_value(); })) throw;
        batch_.drop_finished();
        return std::nullopt;
    }
}

std::optional<std::vector<Accepted>> Schedule::advance() {
    for (Row* row : rows_) row->refresh();
    for (; next_row_ < rows_.size(); ++next_row_) {
        Row& row = *rows_[next_row_];
        if (!is_prefilling_) {
            batch_.drop_finished();
            batch_.active.push_back(&row);
            batch_.recall(row);
            if (std::optional<Accepted> forced = row.finish_reason ? std::nullopt : row.begin(max_capacity())) {
                is_prefilling_ = true;
                return std::vector{std::move(*forced)};
            }
        }
        is_prefilling_ = batch_.prefill(row);
        if (is_prefilling_) return std::vector<Accepted>{};
        if (row.finish_reason) continue;
        std::optional<Accepted> accepted = begin(row);
        batch_.keep(row); // now, because the next prompt may begin with the same tokens
        if (!accepted) continue;
        ++next_row_;
        return std::vector{std::move(*accepted)};
    }
    batch_.drop_finished();
    if (batch_.active.empty()) return std::nullopt;
    return step();
}

namespace {

class CursorCommit : public Schedule {
  public:
    CursorCommit(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id, CostSource cost)
        : Schedule(backend, std::move(rows), block, mask_id) {
        // An engine prepares something for each size of a step, so use few sizes.
        if (cost) policy_.emplace(std::move(cost), backend.max_slots().has_value());
    }

  private:
    // The last piece of a prompt has a full window, because the whole prompt is fed anyway.
    std::optional<Accepted> begin(Row& row) override {
        std::vector<Accepted> accepted = take(batch_.index_of(row), widest_feeds({&row}, {batch_.room(row)}, block_));
        return accepted.empty() ? std::nullopt : std::optional(std::move(accepted.front()));
    }

    std::vector<Accepted> step() override {
        std::vector<Accepted> accepted;
        for (Row* row : batch_.active)
            if (!batch_.fits(*row)) accepted.push_back(row->finish(FinishReason::capacity));
        batch_.drop_finished();
        if (batch_.active.empty()) return accepted;
        // Feed one piece of one row's forced tokens; the other rows decode meanwhile.
        const auto is_behind = [this](const Row* row) { return batch_.is_behind(*row, block_); };
        const auto behind = std::find_if(batch_.active.begin(), batch_.active.end(), is_behind);
        if (behind != batch_.active.end()) batch_.feed_forced(**behind, block_);
        for (const std::vector<Row*>& rows : batch_.neighbours(batch_.active, block_)) {
            std::vector<std::int64_t> rooms;
            for (Row* row : rows) {
                rooms.push_back(batch_.room(*row));
                row->look_around(rooms.back());
            }
            const std::vector<Feed> feeds = policy_ ? policy_->feeds(rows, rooms, block_) : widest_feeds(rows, rooms, block_);
            for (Accepted& each : take(batch_.index_of(*rows.front()), feeds)) accepted.push_back(std::move(each));
        }
        return accepted;
    }

    /// One step of neighbouring rows, and what each accepts.
    std::vector<Accepted> take(std::int64_t first, const std::vector<Feed>& feeds) {
        std::vector<Accepted> accepted;
        std::size_t i = 0;
        for (const Predictions& predictions : batch_.step(first, feeds, Keep::known)) {
            Row& row = *batch_.active[static_cast<std::size_t>(first) + i];
            ++row.stats.forwards;
            std::optional<Accepted> event = row.accept(predictions, feeds[i].proposals);
            if (event) accepted.push_back(std::move(*event));
            Batch::moved(row);
            ++i;
        }
        return accepted;
    }

    std::optional<Policy> policy_;
};

} // namespace

std::unique_ptr<Schedule> decode(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id, CostSource cost) {
    return std::make_unique<CursorCommit>(backend, std::move(rows), block, mask_id, std::move(cost));
}

} // namespace mars
