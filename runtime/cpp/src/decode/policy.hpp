// Chooses what the next step feeds for the highest speed, from what rows have shown and what a step costs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "decode/cost.hpp"
#include "decode/estimates.hpp"
#include "decode/row.hpp"
#include "decode/split.hpp"

namespace mars {

/// What the choice of masks at a tau needs to know of a row.
struct Chooser {
    const PassRates* pass_rates = nullptr;
    std::int64_t pending = 0; ///< tokens whose KV is not final
    std::int64_t most = 0;    ///< masks it can use
    bool is_free = false;     ///< false: it always gets `most`
};

/// Provides the cost of a step for each choice.
using CostSource = std::function<std::shared_ptr<const Cost>()>;

/// Gets the rows, slots and seconds of each decode step.
using StepRecorder = std::function<void(std::int64_t rows, std::int64_t slots, double seconds)>;

/// Chooses the feeds of a batch, step by step, for requests with an automatic window (docs/decoding.md).
///
/// Rows at a tau get the same number of masks; exact rows share a width, because a step is a rectangle. A share of the
/// time is set aside for trying more masks.
class Policy {
  public:
    explicit Policy(CostSource cost) : cost_(std::move(cost)) {}

    /// What each row feeds, with at most `rooms` slots after its pending tokens. Rows at a tau are decided first, then
    /// exact ones.
    std::vector<Feed> feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block);

    /// Masks for each row, 0 to its `most`.
    std::vector<std::int64_t> masks(const std::vector<Chooser>& rows);

  private:
    CostSource cost_;
    double saved_ = 0.0; // seconds set aside for trials
    Splitter splitter_;
};

/// All pending tokens and all proposals of each row, and as many masks as it can use and has room for.
std::vector<Feed> widest_feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block);

} // namespace mars
