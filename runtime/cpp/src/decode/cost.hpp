// What a step costs here by its size, as a small measured table. Knows the device through its backend only, and nothing of pass_rates.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decode/backend.hpp"

namespace mars {

/// Seconds of a step by its positions, which are rows x slots.
class Cost {
  public:
    /// `points`: (positions, seconds), both above 0, the positions rising. Throws SessionError for others.
    ///
    /// Between two points the cost is linear, beyond the last it goes on with the last slope. Where a larger step took less, the
    /// smaller one was held up: it counts as no dearer.
    explicit Cost(std::vector<std::pair<std::int64_t, double>> points);

    double of(double positions) const;

    const std::vector<std::pair<std::int64_t, double>>& points() const { return points_; }

  private:
    std::vector<std::pair<std::int64_t, double>> points_;
};

/// Time steps of one row on a scratch cache, from one slot to four blocks: for each size the least of a few rounds. About a second.
Cost measure(Backend& backend, std::int64_t block, std::int64_t mask_id);

} // namespace mars
