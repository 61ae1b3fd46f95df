// runtime/decode/speculation/cost.py: the cost of a step by its size: a built-in curve, corrected by the steps that run.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

/// The curve of a precision on a CPU or a GPU, before any step has run.
Cost built_in_cost(const std::string& precision, bool is_cpu);

/// Measured steps of one size: their `ratio` to the curve, from about `weight` steps.
struct Learned {
    std::int64_t positions = 0;
    double ratio = 1.0, weight = 0.0;
};

/// The cost of steps, learned while they run.
///
/// Each step counts for the size nearest to its positions, as a ratio to `curve`. The ratio of a size is a moving average
/// over about 8 steps; a single step that was disturbed changes it little. Sizes without steps take the ratios of the
/// sizes around them, and so do sizes whose steps are long ago. The first step of each shape is left out: it allocates.
class LearnedCost {
  public:
    /// Throws SessionError if `learned` is damaged.
    explicit LearnedCost(Cost curve, const std::vector<Learned>& learned = {});

    /// Learn from a step. True if what is learned is worth saving: after 16 steps, 32, 64 and so on.
    bool record(std::int64_t rows, std::int64_t slots, double seconds);

    std::shared_ptr<const Cost> cost();

    /// The learned state, for a later LearnedCost with the same curve.
    std::vector<Learned> learned() const;

  private:
    double seconds(std::size_t i) const;

    Cost curve_;
    std::vector<double> ratios_, weights_;
    std::set<std::pair<std::int64_t, std::int64_t>> shapes_;
    std::int64_t num_recorded_ = 0;
    std::shared_ptr<const Cost> cost_;
};

} // namespace mars
