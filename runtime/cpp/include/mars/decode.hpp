// The decoding loop: prefill, then steps. Made step by step, as accepted tokens; owns cursors and KV rows; speaks token ids only.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <mars/backend.hpp>
#include <mars/cost.hpp>
#include <mars/export.hpp>
#include <mars/row.hpp>

namespace mars {

constexpr std::int64_t prefill_chunk = 256; ///< prompt tokens of one prefill forward

/// What a row feeds into one step: `known` tokens from its cursor on, then `masks` masks.
struct Window {
    std::int64_t known = 0, masks = 0;
    std::int64_t slots() const { return known + masks; }
    std::int64_t outputs() const { return masks + (known > 0 ? 1 : 0); }
};

/// Active rows and their KV memory. Row i of the cache belongs to `active[i]`; a finished row leaves at once.
class MARS_API Batch {
  public:
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id);

    Backend& backend;
    std::vector<Row*> active;

    /// Run one step on the active rows first, first + 1, ... with these windows. Moves no cursor.
    ///
    /// Output j of a row belongs to its last known token for j = 0 and to its mask j - 1 after that; a row with no known
    /// tokens has its masks' outputs from j = 0 on. The output is good until the next step.
    const StepOutput& forward(std::int64_t first, const std::vector<Window>& windows);

    /// Free finished rows: the last active row moves into each gap, so that active rows stay neighbours.
    void drop_finished();

    /// Make KV entries final for one chunk of the row's pending tokens; false when only the last chunk is left.
    bool prefill(Row& row);

    std::int64_t index_of(const Row& row) const;

  private:
    std::int64_t mask_id_;
    std::unique_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
};

/// One cache loop over some rows: Python's generator, as an object.
class MARS_API Steps {
  public:
    virtual ~Steps() = default;

    /// What the next step accepted in each row that took part, nothing for a prefill chunk; no value when all rows are done.
    virtual std::optional<std::vector<Accepted>> next() = 0;
};

/// Decode `rows` with cursor commit. `backend` and `rows` outlive the result. Its next() may throw SessionError.
///
/// A step feeds [tokens accepted last step | masks] from each row's own cursor: the known tokens' KV become final in the
/// same forward that makes the next predictions (paper: "cursor-based cache management"). The last prefill chunk carries
/// masks too, so the first step already yields a run. A row's tau may change, and a row may be cancelled, between two steps.
/// `cost` is for rows whose window is adaptive; without it they get full windows.
MARS_API std::unique_ptr<Steps> decode(Backend& backend, std::vector<Row*> rows, std::int64_t block, std::int64_t mask_id,
                                       std::shared_ptr<const Cost> cost = nullptr);

/// Seconds since it was made.
class Stopwatch {
  public:
    double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count(); }

  private:
    std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

} // namespace mars
