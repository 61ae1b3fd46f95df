// Active sequences, their KV memory, and the forward that every cache loop uses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "decode/sequence.hpp"

namespace mars {

constexpr std::int64_t prefill_chunk = 256; ///< prompt tokens of one prefill forward

/// KV memory for at most `max_rows` sequences: `num_bytes`, or no limit.
///
/// A batch allocates for each sequence as many entries as its longest sequence may need, of `entry_bytes` each. A sequence of this
/// backend holds at most `max_capacity` entries, and always as many if `fixed`.
struct KvBudget {
    std::int64_t max_rows = 1;
    std::optional<std::int64_t> num_bytes = std::nullopt;
    std::int64_t entry_bytes = 1, max_capacity = 0;
    bool fixed = false;

    /// Half of an equal share: `max_rows` such sequences leave half of the memory to longer ones.
    std::int64_t short_bytes() const { return num_bytes.value_or(0) / (2 * max_rows); }

    /// The most that one sequence takes, with the quarter by which memory grows.
    std::int64_t row_bytes(const Sequence& seq) const;

    /// Slots of a decode step that `row_bytes` counts on; no value means any number.
    std::optional<std::int64_t> max_slots() const;
    std::int64_t num_entries() const;

    /// Entries that each of `count` sequences may have; no value means no limit.
    std::optional<std::int64_t> max_entries(std::int64_t count) const;

    /// Throws SessionError for a sequence that does not fit even alone.
    void check(const Sequence& seq) const;
};

/// Active sequences and their KV memory. Row i of the cache belongs to `active[i]`; a finished sequence leaves at once.
class Batch {
  public:
    /// `chunk`: most prompt tokens of one prefill forward. `max_slots`: most slots of a decode step, besides the
    /// backend's limit; no value means any number.
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id, std::int64_t chunk = prefill_chunk,
          std::optional<std::int64_t> max_slots = std::nullopt);

    Backend& backend;
    const std::int64_t num_rows;
    std::vector<Sequence*> active;

    /// Run one step of the active sequences first, first + 1, ... with these plans; returns each sequence's predictions for its
    /// next unknown positions.
    ///
    /// A sequence's first prediction belongs to its last pending token, the others to its draft tokens and masks. A sequence that
    /// feeds no pending token has predictions for its masks only. Rows whose memory ends too early for the widest feed
    /// run separately.
    std::vector<Predictions> step(std::int64_t first, const std::vector<StepPlan>& plans);

    /// The shape of the last forward, and its seconds.
    std::int64_t step_rows() const { return input_.rows; }
    std::int64_t step_slots() const { return input_.slots; }
    double step_seconds() const { return step_seconds_; }

    /// Begin a sequence with the entries that the prefix cache has for its prompt. `most`: entries a sequence may have at most if
    /// saved ones widen all sequences; no value means no limit.
    void lookup(Sequence& seq, std::optional<std::int64_t> most = std::nullopt);
    void move(std::int64_t source, std::int64_t target);

    /// Offer the sequence's final entries to the prefix cache.
    void store(const Sequence& seq);

    /// Tell the prefix cache that the sequence's step is done and its cursor has moved.
    static void moved(const Sequence& seq);

    /// Feed pending tokens of one sequence without outputs; `is_chunk`: they are a whole chunk of its prompt.
    void run_chunk(Sequence& seq, std::int64_t num_tokens, bool is_chunk);

    /// Whether a grammar forced more tokens than one step can feed. The sequence decodes again once they are fed.
    bool is_behind(const Sequence& seq, std::int64_t block) const;

    /// Most pending tokens of an answer that one step feeds.
    std::int64_t max_pending(std::int64_t block) const;

    /// Split neighbouring `seqs` into runs, leaving out sequences for which is_behind.
    std::vector<std::vector<Sequence*>> neighbours(const std::vector<Sequence*>& seqs, std::int64_t block) const;

    /// Slots left in a step after the sequence's pending tokens; negative if even those do not fit.
    std::int64_t room(const Sequence& seq) const;

    /// The same in a decode step.
    std::int64_t decode_room(const Sequence& seq) const;
    bool fits(const Sequence& seq) const { return seq.num_tokens() <= backend.max_capacity(); }

    std::int64_t index_of(const Sequence& seq) const;

    std::int64_t capacity() const { return cache_->capacity(); }
    std::int64_t entry_bytes() const { return cache_->entry_bytes(); }
    std::int64_t chunk() const;

  private:
    void forward(std::int64_t first, const StepPlan* plans, std::int64_t count, bool is_chunk = false);

    std::int64_t mask_id_, chunk_;
    std::optional<std::int64_t> max_slots_;
    std::unique_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
    double step_seconds_ = 0.0;
};

} // namespace mars
