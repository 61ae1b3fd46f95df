// No Python file: the block loop, until libmars has Limits::cache_block too.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "decode/schedule.hpp"

namespace mars {

/// Throws SessionError for requests that this loop does not support.
void check_blocks(const Backend& backend, const std::vector<Sequence*>& seqs, std::int64_t cache_block);

/// The same loop with another commit: cursors move when whole blocks are full.
///
/// The cache holds whole blocks of `cache_block` tokens. An inner step feeds the accepted tokens of the current block and then masks,
/// at most up to the block's end, against the frozen cache. When every sequence's block is full, one more forward writes the blocks
/// into the cache; its last output predicts the first token of the next block.
class BlockSchedule : public Schedule {
  public:
    BlockSchedule(Backend& backend, std::int64_t block, std::int64_t mask_id, std::int64_t num_rows, std::int64_t cache_block)
        : Schedule(backend, block, mask_id, prefill_chunk, KvBudget{num_rows}), cache_block_(cache_block) {}

    std::vector<Accepted> step() override;

  protected:
    std::vector<std::vector<Sequence*>> decoding(std::vector<Accepted>& accepted) override;
    std::vector<StepPlan> decode_plans(const std::vector<Sequence*>& seqs) override;
    StepPlan first_plan(const Sequence& seq) const override { return {seq.num_pending()}; }
    std::optional<Accepted> commit_and_accept(Sequence& seq, const Predictions& predictions, const StepPlan& plan) override;

  private:
    std::int64_t length(const Sequence& seq) const;
    bool is_full(const Sequence& seq) const;
    StepPlan inner_plan(const Sequence& seq) const;

    const std::int64_t cache_block_;
    std::map<std::int64_t, Predictions> first_; // by sequence: the last commit's prediction of the block's first token
    std::map<std::int64_t, StepPlan> plans_;    // by sequence, without waiting ones
};

} // namespace mars
