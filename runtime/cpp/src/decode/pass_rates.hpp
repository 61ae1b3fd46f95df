// How often a row's predictions pass tau, and how many tokens a step may therefore expect. Knows no costs and no tokens.
#pragma once

#include <cstdint>
#include <vector>

namespace mars {

/// For the prediction of the next token, k = 0, and that of the k-th mask, k = 1, 2, ...: how often it passed tau.
///
/// Predictions behind the first that did not pass count too: one full window tells text that the model cannot predict from text that
/// it can. Old observations fade with new ones of the same prediction, not with time: what is not tried is not forgotten.
class PassRates {
  public:
    /// A step accepted `accepted` tokens, and nothing but tau ended its run; `passed[k]`: whether prediction k passed.
    void saw(std::int64_t accepted, const std::vector<bool>& passed);

    /// Tokens that a step with 0, 1, ... `masks` masks is expected to accept; each at least 1, none below the one before.
    std::vector<double> expected(std::int64_t masks) const;

    /// How often the prediction of the next token passed: a mask, which sees less, will hardly do better.
    double certainty() const;

  private:
    std::vector<double> tried_{0.0}, passed_{0.0};
    std::vector<bool> behind_; // of the last step, from the next step's first mask on
};

} // namespace mars
