// What a step costs on this device by its size, as a small measured table.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decode/backend.hpp"

namespace mars {

/// Seconds of a step by its positions (rows x slots).
class Cost {
  public:
    /// `points`: (positions, seconds), both above 0, positions rising. Throws SessionError otherwise.
    ///
    /// The cost is linear between two points and continues with the last slope. If a larger step took less time than a
    /// smaller one, the smaller one was disturbed and gets the lower cost.
    explicit Cost(std::vector<std::pair<std::int64_t, double>> points);

    double of(double positions) const;

    const std::vector<std::pair<std::int64_t, double>>& points() const { return points_; }

  private:
    std::vector<std::pair<std::int64_t, double>> points_;
};

/// Measure steps of one row on a temporary cache, from one slot to four blocks: for each size the shortest of a few
/// rounds. Takes about a second.
Cost measure(Backend& backend, std::int64_t block, std::int64_t mask_id);

} // namespace mars
