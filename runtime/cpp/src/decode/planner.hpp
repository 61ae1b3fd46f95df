// runtime/decode/speculation/planner.py: the plan of the next step that gives the most tokens per second.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/cost.hpp"
#include "decode/exact_planner.hpp"
#include "decode/sequence.hpp"

namespace mars {

/// Chooses the masks of sequences with a tau: the same number for all, because a step is a rectangle.
class TauPlanner {
  public:
    /// Masks of each sequence, from 0 to its `most`; exactly that for a sequence with a fixed number.
    std::vector<std::int64_t> choose(const Cost& cost, const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& most);

  private:
    TrialBudget trial_budget_;
};

/// Chooses the plans of one batch, step by step (docs/decoding.md).
///
/// Sequences with a fixed number of masks feed the widest. Those with automatic masks are left to an ExactPlanner in exact
/// mode, and to a TauPlanner with a tau.
class StepPlanner {
  public:
    /// `cost` must outlive this.
    explicit StepPlanner(LearnedCost& cost) : learned_cost(&cost) {}

    LearnedCost* learned_cost; // the cost of a step, which learns from those that run

    /// The plan of each sequence, with at most `rooms` slots after its pending tokens.
    std::vector<StepPlan> plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms);

    /// The plan of the last chunk of a prompt; `num` sequences take part in the steps that follow.
    ///
    /// In exact mode it has as many masks as pay: the tokens that are expected of them, less the time of the masks and of their
    /// draft tokens beside those of other sequences, at the speed of one token a step.
    StepPlan prompt_plan(const Sequence& seq, std::int64_t room, std::int64_t num) const;

  private:
    ExactPlanner exact_planner_;
    TauPlanner tau_planner_;
};

} // namespace mars
