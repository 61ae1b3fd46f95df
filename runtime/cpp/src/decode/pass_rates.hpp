// How often a row's predictions pass tau, and how many tokens a step can therefore be expected to accept.
#pragma once

#include <cstdint>
#include <vector>

namespace mars {

/// Pass rates by prediction: k = 0 is the next token, k >= 1 the k-th mask.
///
/// Predictions after the first that did not pass count too, so that one full window shows whether the model can predict
/// this text. Old observations fade with newer ones of the same prediction, not with time: what is not tried is not
/// forgotten.
class PassRates {
  public:
    /// Record a step that accepted `accepted` tokens and was ended by tau alone; `passed[k]`: whether prediction k
    /// passed.
    void saw(std::int64_t accepted, const std::vector<bool>& passed);

    /// Expected accepted tokens of a step with 0, 1, ... `masks` masks; each at least 1, never decreasing.
    std::vector<double> expected(std::int64_t masks) const;

    /// How often the prediction of the next token passed. A mask sees less context and will hardly do better.
    double certainty() const;

  private:
    std::vector<double> tried_{0.0}, passed_{0.0};
    std::vector<bool> behind_; // of the last step, from the next step's first mask on
};

} // namespace mars
