// runtime/decode/speculation/planner.py: the plan of the next step that gives the most tokens per second.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "decode/cost.hpp"
#include "decode/exact_planner.hpp"
#include "decode/sequence.hpp"

namespace mars {

/// Provides the cost of a step for each choice.
using CostSource = std::function<std::shared_ptr<const Cost>()>;

/// Gets the sequences, slots and seconds of each decode step.
using StepRecorder = std::function<void(std::int64_t seqs, std::int64_t slots, double seconds)>;

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
    explicit StepPlanner(
        CostSource cost, StepRecorder recorder = [](std::int64_t, std::int64_t, double) {})
        : record(std::move(recorder)), cost_(std::move(cost)) {}

    StepRecorder record;

    /// The plan of each sequence, with at most `rooms` slots after its pending tokens.
    std::vector<StepPlan> plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block);

  private:
    CostSource cost_;
    ExactPlanner exact_planner_;
    TauPlanner tau_planner_;
};

} // namespace mars
