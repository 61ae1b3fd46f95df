// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::array<std::int64_t, 18> sizes{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512};
constexpr double near = 0.25;      // weight of a neighbouring size's ratio beside a size's own, for each size between them
constexpr double kept = 0.999;     // of the weight of a size at each step, so that a size that no longer runs is forgotten
constexpr double max_weight = 7.0; // steps that the ratio of a size remembers
constexpr double limited = 3.0;    // weight from which a single step counts as at most twice its size's ratio
constexpr std::int64_t refresh = 16, max_unsaved = 4096; // recorded steps between two tables, and between two files

} // namespace

Cost::Cost(std::vector<std::pair<std::int64_t, double>> points) : points_(std::move(points)) {
    bool good = !points_.empty();
    for (std::size_t i = 0; i < points_.size(); ++i) {
        const auto& [positions, seconds] = points_[i];
        good = good && positions > (i > 0 ? points_[i - 1].first : 0) && std::isfinite(seconds) && seconds > 0;
    }
    if (!good) throw SessionError("a cost table needs rising positions and seconds above 0");
    for (std::size_t i = points_.size() - 1; i > 0; --i) points_[i - 1].second = std::min(points_[i - 1].second, points_[i].second);
}

double Cost::of(double positions) const {
    if (positions <= static_cast<double>(points_.front().first) || points_.size() == 1) return points_.front().second;
    std::size_t high = 1;
    while (high + 1 < points_.size() && static_cast<double>(points_[high].first) < positions) ++high;
    const auto& [low_at, low] = points_[high - 1];
    const auto& [high_at, dear] = points_[high];
    return low + (dear - low) * ((positions - static_cast<double>(low_at)) / static_cast<double>(high_at - low_at));
}

Cost built_in_cost(const std::string& precision, bool is_cpu) {
    if (!is_cpu) return Cost({{1, 0.0050}, {64, 0.0060}});
    if (precision == "w8a8") return Cost({{1, 0.0063}, {2, 0.0069}, {4, 0.0078}, {8, 0.0100}, {16, 0.0124}, {32, 0.0187}});
    if (precision == "int4" || precision == "int8")
        return Cost({{1, 0.0039}, {2, 0.0047}, {4, 0.0065}, {8, 0.0100}, {16, 0.0146}, {32, 0.0236}});
    return Cost({{1, 0.0094}, {2, 0.0104}, {4, 0.0123}, {8, 0.0170}, {16, 0.0215}, {32, 0.0298}});
}

LearnedCost::LearnedCost(Cost curve, const std::vector<Learned>& learned)
    : curve_(std::move(curve)), ratios_(sizes.size(), 1.0), weights_(sizes.size(), 0.0) {
    for (const auto& [positions, ratio, weight] : learned) {
        const auto at = std::find(sizes.begin(), sizes.end(), positions);
        if (at == sizes.end() || !(ratio > 0 && ratio < 1e9) || !(weight > 0 && weight <= max_weight + 1))
            throw SessionError("a learned cost needs a known size, a ratio and a weight");
        const auto i = static_cast<std::size_t>(at - sizes.begin());
        ratios_[i] = ratio;
        weights_[i] = weight;
    }
}

bool LearnedCost::record(std::int64_t rows, std::int64_t slots, double seconds) {
    if (shapes_.emplace(rows, slots).second) return false;
    const std::int64_t positions = rows * slots;
    auto i = static_cast<std::size_t>(std::lower_bound(sizes.begin(), sizes.end(), positions) - sizes.begin());
    if (i == sizes.size() || (i > 0 && positions - sizes[i - 1] < sizes[i] - positions)) --i;
    for (double& weight : weights_) weight *= kept;
    const double ratio = ratios_[i], weight = std::min(weights_[i], max_weight);
    double shown = std::max(seconds, 1e-9) / curve_.of(static_cast<double>(positions));
    if (weight >= limited) shown = std::min(shown, 2.0 * ratio);
    ratios_[i] = (weight * ratio + shown) / (weight + 1.0);
    weights_[i] = weight + 1.0;
    ++num_recorded_;
    if (num_recorded_ % refresh == 0 || num_recorded_ < refresh) cost_ = nullptr;
    return num_recorded_ >= refresh && ((num_recorded_ & (num_recorded_ - 1)) == 0 || num_recorded_ % max_unsaved == 0);
}

std::shared_ptr<const Cost> LearnedCost::cost() {
    if (cost_ == nullptr) {
        std::vector<std::pair<std::int64_t, double>> points;
        for (std::size_t i = 0; i < sizes.size(); ++i) points.emplace_back(sizes[i], seconds(i));
        cost_ = std::make_shared<const Cost>(std::move(points));
    }
    return cost_;
}

std::vector<Learned> LearnedCost::learned() const {
    std::vector<Learned> known;
    for (std::size_t i = 0; i < sizes.size(); ++i)
        if (weights_[i] > 0) known.push_back({sizes[i], ratios_[i], weights_[i]});
    return known;
}

/// The curve times the mean of the ratios, the nearest sizes counting most.
double LearnedCost::seconds(std::size_t i) const {
    double total = 0.0, weights = 0.0;
    for (std::size_t j = 0; j < sizes.size(); ++j) {
        const double share = weights_[j] * std::pow(near, static_cast<double>(i > j ? i - j : j - i)); // a power of two: exact
        total += share * ratios_[j];
        weights += share;
    }
    return curve_.of(static_cast<double>(sizes[i])) * (weights > 0 ? total / weights : 1.0);
}

} // namespace mars
