// The decoding loop: continuous batching, one step at a time (runtime/decode/schedule.py).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/batch.hpp"
#include "decode/planner.hpp"
#include "decode/queue.hpp"

namespace mars {

/// Running sequences in neighbouring KV rows: first the decoding ones, then those whose prompts are being read, shorter before
/// longer ones.
///
/// A decode step feeds [pending | draft tokens | masks] from each sequence's own cursor: the pending tokens' KV become final in
/// the same forward that verifies the draft tokens and makes the next predictions (paper: "cursor-based cache management").
/// The last chunk of a prompt carries masks too, so the first step already accepts a run. Between two forwards a sequence's tau
/// and exact may change, and a sequence may be cancelled. At most `prefill_tokens` prompt tokens are read between two decode
/// steps. `cost` is needed for sequences with an automatic number of masks; without it they get all masks. `max_rows_per_client`:
/// sequences of one client in the batch; no value means no limit. `record` gets each decode step. One thread owns a schedule, except where noted.
class Schedule {
  public:
    Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, KvBudget budget,
             CostSource cost = nullptr, std::optional<std::int64_t> max_rows_per_client = std::nullopt, StepRecorder record = nullptr);

    virtual ~Schedule() = default;
    Schedule(const Schedule&) = delete;
    Schedule& operator=(const Schedule&) = delete;

    /// Queue a sequence. Clients take turns; a client's sequences keep their order. While a long prompt is being read, a shorter
    /// one may be admitted first.
    void add(std::shared_ptr<Sequence> seq);

    /// One iteration: prompt chunks within the budget, then one step of all decoding sequences. Returns what each sequence got, or
    /// why it failed.
    ///
    /// Sequences that were asked to end leave first, without an event.
    std::vector<Accepted> iterate();

    /// The same, with each event delivered as soon as its forward has run.
    void iterate(const std::function<void(const Accepted&)>& deliver);

    /// The next forward of an iteration.
    std::vector<Accepted> forward();

    /// Whether the last call of `forward` ran the model.
    bool has_run() const { return has_run_; }

    bool is_idle() const { return waiting_.empty() && batch_->active.empty(); }

    /// Running and waiting sequences of a client.
    std::int64_t num_rows_of(const std::string& client) const;

    /// From any thread, as of the last iteration: sequences in the batch, waiting sequences, and KV entries in use.
    std::int64_t num_running() const { return num_running_; }
    std::int64_t num_waiting() const { return num_waiting_; }
    std::int64_t num_entries() const { return num_entries_; }

  protected:
    using Events = std::vector<Accepted>;
    using OutputHandler = std::function<std::optional<Accepted>(Sequence&, const Predictions&, const StepPlan&)>;

    /// The inputs of a prompt's last chunk, and the outcome of its predictions.
    virtual StepPlan first_plan(Sequence& seq);
    virtual std::optional<Accepted> finish_prompt(Sequence& seq, const Predictions& predictions, const StepPlan& plan) {
        return commit_and_accept(seq, predictions, plan);
    }
    virtual void decode(std::vector<Sequence*> seqs, Events& events);

    /// Make the fed pending tokens final, and accept predictions.
    static std::optional<Accepted> commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan);

    /// Run one forward over neighbouring sequences. A failure ends only the sequences that it concerns. False if the forward failed.
    bool run(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans, const OutputHandler& handle, Events& events);

    void drop_finished(Events& events);
    std::vector<Sequence*> decoding() const;

    Backend& backend_;
    const std::int64_t block_;

  private:
    enum class Phase { begin, prompts, forced, decode };

    bool read_prompt(Events& events);
    bool read_forced(Events& events);
    void run_chunk(Sequence& seq, std::int64_t num_tokens, bool is_chunk, Events& events);
    Sequence* reading(Events& events);
    void admit(Events& events);
    bool is_welcome(const Sequence& seq) const;
    void move(std::int64_t source, std::int64_t target, Events& events);
    void renew(std::int64_t num_rows);
    void publish();
    std::int64_t next_chunk(const Sequence& seq) const;
    std::int64_t num_chunks(const Sequence& seq) const;

    const std::int64_t mask_id_, prefill_tokens_;
    const KvBudget budget_;
    std::optional<Planner> planner_;
    const StepRecorder record_;
    const std::optional<std::int64_t> max_rows_per_client_;
    Queue waiting_;
    std::unordered_map<const Sequence*, std::shared_ptr<Sequence>> own_; // waiting and running sequences
    std::unique_ptr<Batch> batch_;
    std::int64_t num_decoding_ = 0;
    Phase phase_ = Phase::begin; // of the current iteration
    std::int64_t left_ = 0;      // prompt tokens that the iteration may still read
    bool has_run_ = false;
    std::int64_t turn_ = 0; // which reader is next

    std::atomic<std::int64_t> num_running_{0}, num_waiting_{0}, num_entries_{0};
};

/// Decodes a fixed set of sequences side by side until all have ended.
class Run {
  public:
    /// The sequences must outlive this.
    Run(std::unique_ptr<Schedule> schedule, const std::vector<Sequence*>& seqs);

    /// The outcome of the next forward: nothing for a prompt's chunk but the last; no value when all sequences have ended. Throws
    /// SessionError if a sequence fails.
    std::optional<std::vector<Accepted>> next();

  private:
    std::unique_ptr<Schedule> schedule_;
};

/// Decode `seqs` with cursor commit. `backend` and `seqs` must outlive the result.
std::unique_ptr<Run> decode(Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t block, std::int64_t mask_id,
                            CostSource cost = nullptr, StepRecorder record = nullptr);

/// Decode `seqs` with block commit, the paper's cache loop: sequences wait for each other at block boundaries. `backend` and `seqs` must outlive the result. Throws SessionError if a block does
/// not fit a step, and for exact sequences.
///
/// The cache holds whole blocks of `cache_block` tokens. An inner step feeds the block's accepted tokens and then masks
/// against the frozen cache; masks never reach past the block's end. When every sequence's block is full, one more forward
/// writes the blocks into the cache; its last output predicts the first token of the next block.
std::unique_ptr<Run> decode_blocks(Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t block, std::int64_t mask_id,
                                   std::int64_t cache_block);

} // namespace mars
