// runtime/decode/batch.py: the active sequences and their KV memory: one forward over neighbours, and how many fit.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decode/backend.hpp"
#include "decode/sequence.hpp"

namespace mars {

/// How many sequences fit in `num_bytes` of KV memory; no value for no limit but `max_rows`.
///
/// `by_row`: memory that is never written costs nothing, as on a host. Sequences then start by the entries that each may need. Else a
/// batch allocates as many for each as the longest needs, and each has an equal share. `entry_bytes`: of one entry. `max_capacity`: most
/// entries of a sequence. `fixed`: a sequence always takes them.
struct KvBudget {
    std::int64_t max_rows = 1;
    std::optional<std::int64_t> num_bytes = std::nullopt;
    std::int64_t entry_bytes = 1, max_capacity = 0;
    bool fixed = false, by_row = true;

    /// Entries of all sequences together, and the most of one sequence.
    std::int64_t num_entries() const { return num_bytes ? *num_bytes / entry_bytes : max_rows * max_capacity; }
    std::int64_t row_entries() const { return by_row ? num_entries() : num_entries() / max_rows; }

    /// Entries of half an equal share: `max_rows` such sequences leave half to longer ones.
    std::int64_t half_share() const { return num_entries() / max_rows / 2; }

    /// Slots of a decode step that `entries` counts on, and entries to which a saved prefix may widen all sequences; no value for any
    /// number.
    std::optional<std::int64_t> max_slots() const;
    std::optional<std::int64_t> max_entries() const;

    /// Throws SessionError for a sequence that does not fit even alone.
    void check(const Sequence& seq) const;

    /// The most that one sequence takes; of memory that is allocated, with the quarter by which it grows at least.
    std::int64_t entries(const Sequence& seq) const;

    /// Entries that a further sequence may have beside `seqs`, no value for any number.
    std::optional<std::int64_t> left(const std::vector<Sequence*>& seqs) const;
};

/// Memory for the entries of `seqs` is short; the others fit.
struct NoMemory {
    std::vector<Sequence*> seqs;
    std::exception_ptr error;
};

/// The sequences that run, in neighbouring KV rows: first the decoding ones, then those whose prompts are being read, shorter ones
/// before longer ones. Row i of the cache belongs to sequence i.
class Batch {
  public:
    /// `releases_rows`: the memory of rows that are not used.
    Batch(Backend& device, std::int64_t num_rows, std::int64_t mask_id, bool releases_rows = false);

    Backend& backend;
    const std::int64_t num_rows;
    std::vector<Accepted> outcomes; ///< what the sequences gave, and how they ended, until it is taken
    bool is_prepared = true;        ///< StepOutput::is_prepared of the last forward
    double step_seconds = 0.0;      ///< of the last forward; its shape:
    std::int64_t step_rows() const { return input_.rows; }
    std::int64_t step_slots() const { return input_.slots; }

    std::vector<Sequence*> active() const { return part(0, active_.size()); }
    std::vector<Sequence*> decoding() const { return part(0, num_decoding_); }

    /// The sequences whose prompts are being read.
    std::vector<Sequence*> prefilling() const { return part(num_decoding_, active_.size()); }

    std::int64_t num_active() const { return static_cast<std::int64_t>(active_.size()); }

    /// Run `body`. If it throws, `seqs` end, and no others.
    template <typename Body>
    void ending(const std::vector<Sequence*>& seqs, const Body& body) {
        try {
            body();
        } catch (const Interrupted&) { // the sequences of that step have ended, and are dropped like others
        } catch (const NoMemory& missing) {
            for (Sequence* seq : missing.seqs) outcomes.push_back(seq->fail(missing.error));
        } catch (...) {
            for (Sequence* seq : seqs) {
                outcomes.push_back(seq->fail(std::current_exception()));
                cache_->release(static_cast<std::int64_t>(row_of(*seq))); // NaN in it would fail the row's next sequence
            }
        }
    }

    std::vector<Accepted> take_outcomes() { return std::exchange(outcomes, {}); }

    /// Run one step on neighbouring sequences with these plans; returns each sequence's predictions.
    ///
    /// The first one belongs to the last pending token; then come draft tokens and masks. Rows whose memory ends too early for the widest
    /// plan run separately.
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
    void add(std::shared_ptr<Sequence> seq);

    /// The prompt of `seq`, the first that is being read, has been read.
    void start_decoding(const Sequence& seq);

    /// Remove sequences that have ended, and close the gaps; decoding sequences stay first.
    void drop_finished();

    /// Free the KV memory; no sequence is active.
    void free();

  private:
    std::vector<Sequence*> part(std::size_t first, std::size_t end) const;
    std::size_t row_of(const Sequence& seq) const;
    std::vector<std::int64_t> lengths() const;
    void move(std::size_t source, std::size_t target);
    void step(std::size_t first, const StepPlan* plans, std::size_t count);
    void reserve(std::size_t first, std::size_t count, std::int64_t slots);
    void release(std::size_t row);
    void shrink();

    std::vector<std::shared_ptr<Sequence>> active_;
    std::size_t num_decoding_ = 0;
    std::int64_t mask_id_;
    bool releases_rows_;
    std::unique_ptr<Cache> cache_;
    StepInput input_;
    StepOutput output_;
};

} // namespace mars
