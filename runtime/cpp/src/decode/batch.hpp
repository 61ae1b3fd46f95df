// runtime/decode/batch.py: the active sequences and their KV memory: one forward over neighbours, and how many fit.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "decode/sequence.hpp"

namespace mars {

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

/// Run `body`. If it throws, `seqs` end, and no others; how they ended is added to `accepted`.
template <typename Body>
void error_boundary(const std::vector<Sequence*>& seqs, std::vector<Accepted>& accepted, const Body& body) {
    try {
        body();
    } catch (const Interrupted&) { // the sequences of that step have ended, and are dropped like others
    } catch (...) {
        for (Sequence* seq : seqs) accepted.push_back(seq->fail(std::current_exception()));
    }
}

/// The sequences that run, in neighbouring KV rows: first the decoding ones, then those whose prompts are being read, shorter ones
/// before longer ones. Row i of the cache belongs to sequence i.
class Batch {
  public:
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id);

    Backend& backend;
    const std::int64_t num_rows;
    double step_seconds = 0.0; ///< of the last forward; its shape:
    std::int64_t step_rows() const { return input_.rows; }
    std::int64_t step_slots() const { return input_.slots; }

    std::vector<Sequence*> active() const { return part(0, active_.size()); }
    std::vector<Sequence*> decoding() const { return part(0, num_decoding_); }

    /// The sequences whose prompts are being read.
    std::vector<Sequence*> readers() const { return part(num_decoding_, active_.size()); }

    std::int64_t num_active() const { return static_cast<std::int64_t>(active_.size()); }

    /// Run one step on neighbouring sequences with these plans; returns each sequence's predictions.
    ///
    /// The first one belongs to the last pending token; then come draft tokens and masks. A sequence that feeds no pending token has
    /// predictions for its masks only. Rows whose memory ends too early for the widest plan run separately.
    std::vector<Predictions> forward(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans);

    /// Slots of a step after the sequence's pending tokens; negative if these do not fit.
    std::int64_t room(const Sequence& seq) const;

    /// Whether the sequence's pending tokens fit in the context.
    bool fits(const Sequence& seq) const { return seq.num_tokens() <= backend.max_capacity(); }

    /// Load the beginning of the sequence's prompt from the prefix cache. `most`: entries to which a saved prefix may widen the
    /// sequences; no value means any number.
    void lookup(Sequence& seq, std::int64_t chunk, std::optional<std::int64_t> most = std::nullopt);

    /// Offer the sequence's final entries to the prefix cache.
    void store(const Sequence& seq);

    /// Add a sequence before the others whose prompts are being read.
    void add(std::shared_ptr<Sequence> seq, std::vector<Accepted>& accepted);

    /// The prompt of `seq`, the first that is being read, has been read.
    void start_decoding(const Sequence& seq);

    /// Remove sequences that have ended, and close the gaps; decoding sequences stay first.
    void drop_finished(std::vector<Accepted>& accepted);

    /// Free the KV memory; no sequence is active.
    void free();

  private:
    std::vector<Sequence*> part(std::size_t first, std::size_t end) const;
    std::size_t row_of(const Sequence& seq) const;
    std::vector<std::int64_t> lengths() const;
    void move(std::size_t source, std::size_t target, std::vector<Accepted>& accepted);
    void step(std::size_t first, const StepPlan* plans, std::size_t count);

    std::vector<std::shared_ptr<Sequence>> active_;
    std::size_t num_decoding_ = 0;
    std::int64_t mask_id_;
    std::unique_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
};

} // namespace mars
