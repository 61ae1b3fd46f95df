// How many masks the next step feeds, so that tokens come fastest: what rows have shown against what a step costs. Knows no device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <mars/cost.hpp>
#include <mars/export.hpp>
#include <mars/pass_rates.hpp>

namespace mars {

/// What the choice needs to know of one row.
struct Chooser {
    const PassRates* pass_rates = nullptr;
    std::int64_t pending = 0; ///< tokens whose KV is not final
    std::int64_t most = 0;    ///< masks it can use
    bool is_free = false;     ///< false: it gets `most`
};

/// What a step costs, asked for when it is first needed.
using CostSource = std::function<std::shared_ptr<const Cost>()>;

/// Chooses the masks of the rows of one batch, step by step, for requests whose window is automatic (docs/decoding.md).
///
/// All those rows get the same number, because a step is a rectangle. A share of the time is set aside for trying more masks. `few_sizes`:
/// choose among 0, 1, 3, 7, ... and the most, for a device that prepares something for each size of a step.
class MARS_API Policy {
  public:
    explicit Policy(CostSource cost, bool few_sizes = false);

    /// Masks for each row, from 0 to its `most`.
    std::vector<std::int64_t> masks(const std::vector<Chooser>& rows);

  private:
    CostSource cost_;
    bool few_sizes_;
    double saved_ = 0.0; // seconds set aside for trials
};

} // namespace mars
