// runtime/decode/schedule.py: the decoding loop: continuous batching, one step at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decode/batch.hpp"
#include "decode/planner.hpp"
#include "decode/prefill.hpp"
#include "decode/queue.hpp"

namespace mars {

/// Waiting sequences, and the batch of running ones.
///
/// A decode step feeds [pending | draft tokens | masks] from each sequence's cursor. The KV entries of pending tokens become final in
/// the same forward that verifies the draft tokens and makes the next predictions (paper: "cursor-based cache management"). The last
/// chunk of a prompt has masks too, so that the first step gives several tokens. Without a `planner` all masks are fed.
/// `max_rows_per_client`: sequences of one client in the batch; no value means no limit. One thread owns a schedule, except where
/// noted.
class Schedule {
  public:
    Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t prefill_tokens, const KvBudget& budget,
             std::optional<StepPlanner> planner = std::nullopt, std::optional<std::int64_t> max_rows_per_client = std::nullopt);

    virtual ~Schedule() = default;
    Schedule(const Schedule&) = delete;
    Schedule& operator=(const Schedule&) = delete;

    /// One step: a chunk of one sequence's known tokens, or else a forward of all decoding sequences.
    ///
    /// Returns the outcome for each sequence. A sequence that was asked to end leaves before anything else happens.
    virtual std::vector<Accepted> step();

    /// The steps of one iteration, each delivered as it is run: chunks, and then one of all decoding sequences.
    void steps(const std::function<void(const Accepted&)>& deliver);

    /// Queue a sequence. Clients take turns, and the sequences of each start in the order in which they were added; a shorter prompt
    /// may pass them only while a long prompt is being read.
    void add(std::shared_ptr<Sequence> seq);

    bool is_idle() const { return waiting_.empty() && batch_.num_active() == 0; }

    /// Whether the last step fed a chunk.
    bool has_read() const { return reader_ != nullptr; }

    /// Running and waiting sequences of a client.
    std::int64_t num_rows_of(const std::string& client) const;

    /// From any thread, as of the last step: sequences in the batch, waiting sequences, and KV entries in use.
    std::int64_t num_running() const { return num_running_; }
    std::int64_t num_waiting() const { return num_waiting_; }
    std::int64_t num_entries() const { return num_entries_; }

  protected:
    // --- the parts of a step ---

    /// Drop sequences that have ended, start waiting ones, and return the groups of neighbours that run now.
    std::vector<std::vector<Sequence*>> admit(std::vector<Accepted>& accepted);

    /// The plans of these sequences.
    std::vector<StepPlan> plan(const std::vector<Sequence*>& seqs);

    /// Run the model.
    std::vector<Predictions> forward(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans);

    /// Add the outcome of the forward for each sequence. An error ends the sequence that it concerns.
    void accept(const std::vector<Sequence*>& seqs, const std::vector<StepPlan>& plans, const std::vector<Predictions>& predictions,
                std::vector<Accepted>& accepted);

    /// Drop sequences that have ended; at the end of an iteration without others, free the KV memory.
    void finish(std::vector<Accepted>& accepted);

    // --- overridden by BlockSchedule ---

    /// The groups of neighbours that take a decode step. Sequences whose context is full end.
    virtual std::vector<std::vector<Sequence*>> decoding(std::vector<Accepted>& accepted);

    /// The plans of these sequences for a decode step.
    virtual std::vector<StepPlan> decode_plans(const std::vector<Sequence*>& seqs);

    /// Slots of a decode step after the sequence's pending tokens.
    std::int64_t room(const Sequence& seq) const;

    /// The last chunk of a prompt, with all masks: all its tokens are fed anyway.
    virtual StepPlan first_plan(const Sequence& seq) const;

    /// Take the predictions of the last chunk of a prompt, or of a decode step.
    virtual std::optional<Accepted> commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan);

    Backend& backend_;
    const std::int64_t block_;
    Batch batch_;
    const Sequence* reader_ = nullptr; // of the chunk that the current step, or the last one, feeds

  private:
    void drop_finished(std::vector<Accepted>& accepted);
    void publish();

    const KvBudget budget_;
    std::optional<StepPlanner> planner_;
    Queue waiting_;
    Prefill prefill_;
    std::atomic<std::int64_t> num_running_{0}, num_waiting_{0}, num_entries_{0};
};

/// Decodes a fixed set of sequences side by side until all have ended.
class Run {
  public:
    /// The sequences must outlive this.
    Run(std::unique_ptr<Schedule> schedule, const std::vector<Sequence*>& seqs);

    /// The outcome of the next step: nothing for a chunk; no value when all sequences have ended. Throws SessionError if a sequence fails.
    std::optional<std::vector<Accepted>> next();

  private:
    std::unique_ptr<Schedule> schedule_;
};

} // namespace mars
