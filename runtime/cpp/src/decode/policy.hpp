// What the next step feeds, so that tokens come fastest: what rows have shown against what a step costs. Knows no device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "decode/cost.hpp"
#include "decode/pass_rates.hpp"
#include "decode/row.hpp"
#include "decode/split.hpp"

namespace mars {

/// What the choice of masks at a tau needs to know of one row.
struct Chooser {
    const PassRates* pass_rates = nullptr;
    std::int64_t pending = 0; ///< tokens whose KV is not final
    std::int64_t most = 0;    ///< masks it can use
    bool is_free = false;     ///< false: it gets `most`
};

/// What a step costs, asked for when it is first needed.
using CostSource = std::function<std::shared_ptr<const Cost>()>;

/// Chooses what the rows of one batch feed, step by step, for requests whose window is automatic (docs/decoding.md).
///
/// A step is a rectangle: rows at a tau get the same number of masks, exact rows share a width. A share of the time is set aside for trying
/// more masks. `few_sizes`: choose among few sizes of a step, for a device that prepares something for each.
class Policy {
  public:
    explicit Policy(CostSource cost, bool few_sizes = false);

    /// What each row feeds, with at most `rooms` slots behind its known tokens: tau rows are chosen for first, then exact ones.
    std::vector<Feed> feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block);

    /// Masks for each row, from 0 to its `most`.
    std::vector<std::int64_t> masks(const std::vector<Chooser>& rows);

  private:
    CostSource cost_;
    bool few_sizes_;
    double saved_ = 0.0; // seconds set aside for trials
    Splitter splitter_;
};

/// All known tokens of each row, all its proposals, and as many masks as it may feed and there is room for.
std::vector<Feed> widest_feeds(const std::vector<Row*>& rows, const std::vector<std::int64_t>& rooms, std::int64_t block);

} // namespace mars
