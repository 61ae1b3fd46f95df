// runtime/decode/schedule.py: the decoding loop: continuous batching, one step at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <mars/batcher.hpp>

#include "decode/batch.hpp"
#include "decode/planner.hpp"
#include "decode/prefill.hpp"
#include "decode/queue.hpp"

namespace mars {

/// Waiting sequences, and the batch of running ones.
///
/// A decode step feeds [pending | draft tokens | masks] from each sequence's cursor. The KV entries of pending tokens become final in
/// the same forward that verifies the draft tokens and makes the next predictions (paper: "cursor-based cache management"); with a tau
/// only when `limits.cache_block` tokens are pending. The last chunk of a prompt has masks too, so that the first step gives several
/// tokens. Without a `planner` all masks are fed. `budget`: of KV memory, no value for no limit. Throws SessionError if a cache block
/// does not fit a step. One thread owns a schedule, except where noted.
class Schedule {
  public:
    Schedule(Backend& backend, std::int64_t block, std::int64_t mask_id, const Limits& limits,
             std::optional<StepPlanner> planner = std::nullopt, const std::optional<KvBudget>& budget = std::nullopt);

    Schedule(const Schedule&) = delete;
    Schedule& operator=(const Schedule&) = delete;

    /// The next forward, and its outcomes. A step: chunks of prompts, one of a long forced text, then a forward of all decoding
    /// sequences. What other threads asked of the sequences is taken before each of them; those that they ended leave first.
    std::vector<Accepted> step();

    /// Whether the last step goes on: its last forward was a chunk.
    bool is_in_step() const { return stage_ != Stage::start; }

    /// Queue a sequence. Clients take turns, and the sequences of each start in the order in which they were added; a shorter prompt
    /// may pass them only while a long prompt is being read.
    void add(std::shared_ptr<Sequence> seq);

    bool is_idle() const { return waiting_.empty() && batch_.num_active() == 0; }

    /// From any thread, as of the last forward: sequences that run, and those of half an equal share of the KV memory that could start
    /// (none could while one waits for memory).
    std::int64_t num_rows() const { return num_rows_; }

    /// From any thread, as of the last forward: sequences in the batch, waiting sequences, and KV entries in use.
    std::int64_t num_running() const { return num_running_; }
    std::int64_t num_waiting() const { return num_waiting_; }
    std::int64_t num_entries() const { return num_entries_; }

  private:
    enum class Stage { start, prompts, decode };

    Sequence* behind() const;
    std::int64_t feed_chunk(Sequence& seq, std::int64_t chunk);
    void decode();
    std::vector<StepPlan> plans_of(const std::vector<Sequence*>& seqs);
    void take(Sequence& seq, const Predictions& predictions, const StepPlan& plan);
    void drop_finished();
    std::int64_t room(const Sequence& seq) const;
    void publish();

    Backend& backend_;
    const std::int64_t block_;
    const Limits limits_;
    const KvBudget budget_;
    std::optional<StepPlanner> planner_;
    Queue waiting_;
    Batch batch_;
    Prefill prefill_;
    Stage stage_ = Stage::start; // what comes next in the step
    std::int64_t left_ = 0;      // prompt tokens of the step
    std::atomic<std::int64_t> num_rows_{0}, num_running_{0}, num_waiting_{0}, num_entries_{0};
};

/// Decodes a fixed set of sequences side by side until all have ended.
class Run {
  public:
    /// The sequences must outlive this.
    Run(std::unique_ptr<Schedule> schedule, const std::vector<Sequence*>& seqs);

    /// The outcomes of the next forward: none for a chunk; no value when all sequences have ended. Throws SessionError if a sequence fails.
    std::optional<std::vector<Accepted>> next();

  private:
    std::unique_ptr<Schedule> schedule_;
};

} // namespace mars
