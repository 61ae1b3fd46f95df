// How often a row's masks were accepted, and how many tokens a step may therefore expect. Knows no costs and no tokens.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/export.hpp>

namespace mars {

/// For the k-th mask of a step, k = 1, 2, ...: how often its token was accepted when those before it were.
///
/// Old observations fade with new ones of the same mask, not with time: what is not tried is not forgotten.
class MARS_API Acceptance {
  public:
    /// A step with `masks` masks accepted `accepted` tokens, and nothing but tau ended its run.
    void saw(std::int64_t accepted, std::int64_t masks);

    /// Tokens that a step with 0, 1, ... `masks` masks is expected to accept; each at least 1, none below the one before.
    std::vector<double> expected(std::int64_t masks) const;

  private:
    std::vector<double> tried_, accepted_;
};

} // namespace mars
