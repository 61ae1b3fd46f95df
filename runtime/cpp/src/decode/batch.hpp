// Active rows and their KV memory, and the one step that every way to decode takes. Accepts nothing; speaks token ids only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "decode/feed.hpp"
#include "decode/row.hpp"

namespace mars {

constexpr std::int64_t prefill_chunk = 256; ///< prompt tokens of one prefill forward

/// Whether a step's known tokens get their place in the cache: the cursor moves behind them, or stays before them.
enum class Keep { nothing, known };

/// Active rows and their KV memory. Row i of the cache belongs to `active[i]`; a finished row leaves at once.
class Batch {
  public:
    /// `piece`: prompt tokens of one prefill forward, at most.
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id, std::int64_t piece = prefill_chunk);

    Backend& backend;
    const std::int64_t num_rows;
    std::vector<Row*> active;

    /// One step of the active rows first, first + 1, ... with these feeds: what each predicts for its next unknown positions.
    ///
    /// A row's first prediction belongs to its last known token, the others to its proposals and its masks; a row with no known tokens
    /// has those of its masks. Rows too near the end of their memory for the widest feed are run by themselves.
    std::vector<Predictions> step(std::int64_t first, const std::vector<Feed>& feeds, Keep keep);

    /// Begin a row with what the store of prefixes has of its prompt, if it has a share in one. `most`: entries to which saved ones may
    /// widen the rows, none for any number.
    void recall(Row& row, std::optional<std::int64_t> most = std::nullopt);

    /// The row at `source` gets the place `target`, with its final entries.
    void move(std::int64_t source, std::int64_t target);

    /// Let the store of prefixes have the row's final entries.
    void keep(const Row& row);

    /// The step is done that the row took part in, and its cursor is where that left it.
    static void moved(const Row& row);

    /// Free finished rows: the last active row moves into each gap, so that active rows stay neighbours.
    void drop_finished();

    /// Make KV entries final for one chunk of the row's pending tokens; false when only the last chunk is left.
    bool prefill(Row& row);

    /// Whether a grammar forced more than a step holds: the row decodes again when that is fed.
    bool is_behind(const Row& row, std::int64_t block) const;

    /// A piece of such a text, of which nothing is asked.
    void feed_forced(Row& row, std::int64_t block);

    /// Active `rows`, neighbours all of them, in runs of those that are not behind.
    std::vector<std::vector<Row*>> neighbours(const std::vector<Row*>& rows, std::int64_t block) const;

    /// Slots that a step has behind the row's known tokens; below 0 where they do not even fit.
    std::int64_t room(const Row& row) const;

    /// Whether the row's pending tokens still have room in the context.
    bool fits(const Row& row) const { return row.num_tokens() <= backend.max_capacity(); }

    std::int64_t index_of(const Row& row) const;

    /// The rows' memory, to interrupt what runs on it; it goes with the batch.
    std::weak_ptr<Cache> cache() const { return cache_; }

    std::int64_t capacity() const { return cache_->capacity(); }
    std::int64_t entry_bytes() const { return cache_->entry_bytes(); }

    /// Prompt tokens of one prefill forward.
    std::int64_t piece() const;

  private:
    void forward(std::int64_t first, const Feed* feeds, std::int64_t count, bool is_piece = false);

    /// Tokens of an answer that a step feeds at once.
    std::int64_t most_known(std::int64_t block) const;

    std::int64_t mask_id_, piece_;
    std::shared_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
};

} // namespace mars
