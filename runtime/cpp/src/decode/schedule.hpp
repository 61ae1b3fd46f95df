// The decoding loop over a fixed set of rows: prefill, then steps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/batch.hpp"
#include "decode/policy.hpp"

namespace mars {

/// Decodes its rows: the prompts one after the other, then steps of all rows until each has ended.
class Schedule {
  public:
    virtual ~Schedule() = default;

    /// What the next forward gave each row that took part: nothing for a prefill piece; no value when all rows are
    /// done.
    std::optional<std::vector<Accepted>> next();

    /// The rows' memory, for interrupting it after all rows were asked to end.
    std::weak_ptr<Cache> cache() const { return batch_.cache(); }

  protected:
    Schedule(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id);

    /// Feed the last piece of a prompt; no value if that accepts nothing yet.
    virtual std::optional<Accepted> begin(Row& row) = 0;

    /// One step of the active rows, of which there is at least one.
    virtual std::vector<Accepted> step() = 0;

    std::int64_t max_capacity() const { return batch_.backend.max_capacity(); }

    Batch batch_;
    std::int64_t block_;

  private:
    std::optional<std::vector<Accepted>> advance();

    std::vector<Row*> rows_;
    std::size_t next_row_ = 0;   // the first row whose prefill is not done
    bool is_prefilling_ = false; // whether that row has begun
};

/// Decode `rows` with cursor commit. `backend` and `rows` must outlive the result. Its next() may throw SessionError.
///
/// A step feeds [pending | proposals | masks] from each row's own cursor: the pending tokens' KV become final in the
/// same forward that verifies the proposals and makes the next predictions (paper: "cursor-based cache management").
/// The last prefill piece carries masks too, so the first step already accepts a run. Between two steps a row's tau and
/// exact may change, and a row may be cancelled. `cost` is needed for rows with an automatic window; without it they
/// get full windows.
std::unique_ptr<Schedule> decode(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                                 CostSource cost = nullptr);

} // namespace mars
