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

/// Chooses the plans of a batch, step by step, for requests with an automatic number of masks (docs/decoding.md).
///
/// Rows at a tau get the same number of masks; exact sequences share a width, because a step is a rectangle. A share of the
/// time is set aside for trying more masks.
class Planner {
  public:
    explicit Planner(
        CostSource cost, StepRecorder recorder = [](std::int64_t, std::int64_t, double) {})
        : record(std::move(recorder)), cost_(std::move(cost)) {}

    StepRecorder record;

    /// The inputs of each sequence, with at most `rooms` slots after its pending tokens. Rows at a tau are decided first, then
    /// exact ones.
    std::vector<StepPlan> plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block);

    /// Masks of each sequence, from 0 to its `most`; exactly that for a sequence with a fixed number.
    std::vector<std::int64_t> masks(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& most);

  private:
    CostSource cost_;
    double saved_ = 0.0; // seconds set aside for trials
    ExactPlanner exact_planner_;
};

} // namespace mars
