// Active rows, their KV memory, and the forward that every cache loop uses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "decode/row.hpp"

namespace mars {

constexpr std::int64_t prefill_chunk = 256; ///< prompt tokens of one prefill forward

/// KV memory for at most `max_rows` rows: `num_bytes`, or no limit.
///
/// A batch allocates for each row as many entries as its longest row may need, of `entry_bytes` each. A row of this
/// backend holds at most `max_capacity` entries, and always as many if `fixed`.
struct KvBudget {
    std::int64_t max_rows = 1;
    std::optional<std::int64_t> num_bytes = std::nullopt;
    std::int64_t entry_bytes = 1, max_capacity = 0;
    bool fixed = false;

    /// Half of an equal share: `max_rows` such rows leave half of the memory to longer ones.
    std::int64_t short_bytes() const { return num_bytes.value_or(0) / (2 * max_rows); }

    /// The most that one row takes, with the quarter by which memory grows.
    std::int64_t row_bytes(const Row& row) const;

    /// Slots of a decode step that `row_bytes` counts on; no value means any number.
    std::optional<std::int64_t> max_slots() const;
    std::int64_t num_entries() const;

    /// Entries that each of `rows` rows may have; no value means no limit.
    std::optional<std::int64_t> max_entries(std::int64_t rows) const;

    /// Throws SessionError for a row that does not fit even alone.
    void check(const Row& row) const;
};

/// Active rows and their KV memory. Row i of the cache belongs to `active[i]`; a finished row leaves at once.
class Batch {
  public:
    /// `chunk`: most prompt tokens of one prefill forward. `max_slots`: most slots of a decode step, besides the
    /// backend's limit; no value means any number.
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id, std::int64_t chunk = prefill_chunk,
          std::optional<std::int64_t> max_slots = std::nullopt);

    Backend& backend;
    const std::int64_t num_rows;
    std::vector<Row*> active;

    /// Run one step of the active rows first, first + 1, ... with these feeds; returns each row's predictions for its
    /// next unknown positions.
    ///
    /// A row's first prediction belongs to its last pending token, the others to its proposals and masks. A row that
    /// feeds no pending token has predictions for its masks only. Rows whose memory ends too early for the widest feed
    /// run separately.
    std::vector<Predictions> step(std::int64_t first, const std::vector<Feed>& feeds);

    /// The shape of the last forward, and its seconds.
    std::int64_t step_rows() const { return input_.rows; }
    std::int64_t step_slots() const { return input_.slots; }
    double step_seconds() const { return step_seconds_; }

    /// Begin a row with the entries that the prefix cache has for its prompt. `most`: entries a row may have at most if
    /// saved ones widen all rows; no value means no limit.
    void recall(Row& row, std::optional<std::int64_t> most = std::nullopt);
    void move(std::int64_t source, std::int64_t target);

    /// Offer the row's final entries to the prefix cache.
    void keep(const Row& row);

    /// Tell the prefix cache that the row's step is done and its cursor has moved.
    static void moved(const Row& row);

    /// Feed pending tokens of one row without outputs; `is_chunk`: they are a whole chunk of its prompt.
    void feed(Row& row, std::int64_t num_tokens, bool is_chunk);

    /// Whether a grammar forced more tokens than one step can feed. The row decodes again once they are fed.
    bool is_behind(const Row& row, std::int64_t block) const;

    /// Most pending tokens of an answer that one step feeds.
    std::int64_t max_pending(std::int64_t block) const;

    /// Split neighbouring `rows` into runs, leaving out rows for which is_behind.
    std::vector<std::vector<Row*>> neighbours(const std::vector<Row*>& rows, std::int64_t block) const;

    /// Slots left in a step after the row's pending tokens; negative if even those do not fit.
    std::int64_t room(const Row& row) const;

    /// The same in a decode step.
    std::int64_t decode_room(const Row& row) const;
    bool fits(const Row& row) const { return row.num_tokens() <= backend.max_capacity(); }

    std::int64_t index_of(const Row& row) const;

    std::int64_t capacity() const { return cache_->capacity(); }
    std::int64_t entry_bytes() const { return cache_->entry_bytes(); }
    std::int64_t chunk() const;

  private:
    void forward(std::int64_t first, const Feed* feeds, std::int64_t count, bool is_chunk = false);

    std::int64_t mask_id_, chunk_;
    std::optional<std::int64_t> max_slots_;
    std::unique_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
    double step_seconds_ = 0.0;
};

} // namespace mars
