// runtime/decode/speculation/cost.py: the cost of a step by its size: a built-in curve, corrected by the steps that run.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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

/// The cost of steps, learned while they run. Thread-safe.
///
/// A slow minute slows all sizes alike, so each step is compared with the one before it: if it took longer in proportion than
/// the table says, its size and those beyond become a little slower, the other size and those on its side a little faster, by
/// 1.5 % at most. What no later steps confirm fades, so that a size costs what `curve` says again, and is tried again.
class LearnedCost {
  public:
    explicit LearnedCost(Cost curve);

    /// Use this table, and learn no more.
    void fix(Cost cost);

    /// Learn from a step.
    void record(std::int64_t rows, std::int64_t slots, double seconds);

    /// The table of now, in seconds of this machine.
    std::shared_ptr<const Cost> cost();

  private:
    const Cost curve_;
    std::mutex mutex_;
    std::vector<double> factors_; // of the curve, which has the shape only
    double pace_ = 0.0;           // seconds by the clock for each by curve and factors; 0 before the first step
    std::size_t last_ = 0;        // the last step's size
    double last_pace_ = 0.0;
    std::int64_t num_recorded_ = 0;
    std::shared_ptr<const Cost> cost_;
    bool is_fixed_ = false;
};

} // namespace mars
