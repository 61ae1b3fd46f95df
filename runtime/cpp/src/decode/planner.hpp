// Chooses what the next step feeds for the highest speed, from what sequences have shown and what a step costs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "decode/cost.hpp"
#include "decode/estimates.hpp"
#include "decode/exact_planner.hpp"
#include "decode/sequence.hpp"

namespace mars {

/// The facts about a sequence for the choice of masks at a tau.
struct Chooser {
    const PassRates* pass_rates = nullptr;
    std::int64_t pending = 0; ///< tokens whose KV is not final
    std::int64_t most = 0;    ///< masks it can use
    bool is_free = false;     ///< false: it always gets `most`
};

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
    explicit Planner(CostSource cost) : cost_(std::move(cost)) {}

    /// The inputs of each sequence, with at most `rooms` slots after its pending tokens. Rows at a tau are decided first, then
    /// exact ones.
    std::vector<StepPlan> plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block);

    /// Masks for each sequence, 0 to its `most`.
    std::vector<std::int64_t> masks(const std::vector<Chooser>& seqs);

  private:
    CostSource cost_;
    double saved_ = 0.0; // seconds set aside for trials
    ExactPlanner exact_planner_;
};

/// All pending tokens and all draft tokens of each sequence, and as many masks as it can use and has room for.
std::vector<StepPlan> widest_plans(const std::vector<Sequence*>& seqs, const std::vector<std::int64_t>& rooms, std::int64_t block);

} // namespace mars
