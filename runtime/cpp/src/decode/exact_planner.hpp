// runtime/decode/speculation/planner.py: how a verifying step is split into draft tokens and masks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "decode/cost.hpp"

namespace mars {

/// The slots that one sequence may feed, and their expected outcome.
///
/// pending: tokens that are fed in any case. probabilities[i]: the acceptance probability of draft token i if those before it
/// are accepted. ending: the same for an end-of-sequence token proposed right after them, if one was. expected[m]: expected
/// number of accepted draft tokens of m masks, for 0, 1, ... as many as may be fed. room: slots after the pending tokens.
struct StepForecast {
    std::int64_t pending = 0;
    std::vector<double> probabilities;
    std::optional<double> ending;
    std::vector<double> expected;
    std::int64_t room = 0;

    std::int64_t num_draft_tokens() const { return static_cast<std::int64_t>(probabilities.size()); }
    std::int64_t max_masks() const { return static_cast<std::int64_t>(expected.size()) - 1; }
};

/// The time for trials: steps with about twice the masks that seem to pay. Without trials, masks that are not fed would show nothing.
class TrialBudget {
  public:
    /// Set aside a share of a step's `seconds`, up to `most` in all.
    void add(double seconds, double most);

    /// Whether there is enough for a trial that loses `loss` seconds; if so, they are spent.
    bool pays(double loss);

  private:
    double seconds_ = 0.0;
};

/// Chooses the plans of sequences that verify, step by step; all sequences share a width, because a step is a rectangle.
///
/// The choice maximizes what is expected of this step and of the masks' draft tokens in the next one, against what the slots cost at the
/// speed that the sequences have shown (the relative value of an average-reward decision process).
class ExactPlanner {
  public:
    /// Feeds for `forecasts` (at least one). `others` more sequences take part in the step, which is at least `floor` slots wide.
    std::vector<StepPlan> choose(const Cost& cost, const std::vector<StepForecast>& forecasts, std::int64_t others = 0,
                                 std::int64_t floor = 0);

  private:
    TrialBudget trial_budget_;
};

} // namespace mars
