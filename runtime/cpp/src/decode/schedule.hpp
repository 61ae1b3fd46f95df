// The decoding loop: prefill, then steps. Made step by step, as accepted tokens; owns cursors, and knows no text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/batch.hpp"
#include "decode/policy.hpp"

namespace mars {

/// Rows on their way: one prompt after the other, then steps of all rows together, until each has ended. Python's generator, as an object.
class Schedule {
  public:
    virtual ~Schedule() = default;

    /// What the next step accepted in each row that took part, nothing for a prefill chunk; no value when all rows are done.
    std::optional<std::vector<Accepted>> next();

    /// The rows' memory: who told all rows to end may interrupt it.
    std::weak_ptr<Cache> cache() const { return batch_.cache(); }

  protected:
    Schedule(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id);

    /// The last chunk of a prompt; no value where that accepts nothing yet.
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
    bool is_prefilling_ = false; // that row has begun
};

/// Decode `rows` with cursor commit. `backend` and `rows` outlive the result. Its next() may throw SessionError.
///
/// A step feeds [known | proposals | masks] from each row's own cursor: the known tokens' KV become final in the same forward that
/// verifies the proposals and makes the next predictions (paper: "cursor-based cache management"). The last prefill chunk carries
/// masks too, so the first step already yields a run. A row's tau and exact may change, and a row may be cancelled, between two steps.
/// `cost` is asked for rows whose window is automatic; without it they get full windows.
std::unique_ptr<Schedule> decode(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                                 CostSource cost = nullptr);

} // namespace mars
