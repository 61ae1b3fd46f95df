// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::array<std::int64_t, 18> sizes{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512};
constexpr double limit = 0.15;       // of the difference of two steps over their sum: a disturbed step counts no more
constexpr double gain = 0.1;         // of it by which a comparison changes the factors of sizes
constexpr double forget = 0.001;     // share of what was learned of a size that each step takes away
constexpr double pace_keep = 0.9;    // weight of the earlier steps' pace after a newer step's
constexpr std::int64_t refresh = 16; // recorded steps after which the table is made again

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
    if (precision == "w8a8" || precision == "w4a8")
        return Cost({{1, 0.0063}, {2, 0.0069}, {4, 0.0078}, {8, 0.0100}, {16, 0.0124}, {32, 0.0187}});
    if (precision == "int4" || precision == "int8")
        return Cost({{1, 0.0039}, {2, 0.0047}, {4, 0.0065}, {8, 0.0100}, {16, 0.0146}, {32, 0.0236}});
    return Cost({{1, 0.0094}, {2, 0.0104}, {4, 0.0123}, {8, 0.0170}, {16, 0.0215}, {32, 0.0298}});
}

LearnedCost::LearnedCost(Cost curve) : curve_(std::move(curve)), factors_(sizes.size(), 1.0) {}

void LearnedCost::fix(Cost cost) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cost_ = std::make_shared<const Cost>(std::move(cost));
    is_fixed_ = true;
}

void LearnedCost::record(std::int64_t rows, std::int64_t slots, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_fixed_) return;
    const std::int64_t positions = rows * slots;
    const auto is_nearer = [&](std::int64_t a, std::int64_t b) { return std::abs(a - positions) < std::abs(b - positions); };
    const auto i = static_cast<std::size_t>(std::min_element(sizes.begin(), sizes.end(), is_nearer) - sizes.begin());
    const double pace = std::max(seconds, 1e-9) / (curve_.of(static_cast<double>(positions)) * factors_[i]);
    if (num_recorded_ == 0) {
        pace_ = last_pace_ = pace;
        last_ = i;
    }
    const double change = gain * std::clamp((pace - last_pace_) / (pace + last_pace_), -limit, limit);
    const auto at = static_cast<double>(i), last_at = static_cast<double>(last_);
    for (std::size_t j = 0; j < sizes.size(); ++j) { // 1 for this size, -1 for the last one
        const double side = i == last_ ? 0.0 : (2.0 * static_cast<double>(j) - at - last_at) / (at - last_at);
        const double changed = factors_[j] * (1.0 + change * std::clamp(side, -1.0, 1.0));
        factors_[j] = changed + forget * (1.0 - changed);
    }
    pace_ = pace_keep * pace_ + (1.0 - pace_keep) * std::min(pace, 2.0 * pace_);
    last_ = i;
    last_pace_ = pace;
    ++num_recorded_;
    if (num_recorded_ % refresh == 0 || num_recorded_ < refresh) cost_ = nullptr;
}

std::shared_ptr<const Cost> LearnedCost::cost() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cost_ == nullptr) {
        const double pace = num_recorded_ > 0 ? pace_ : 1.0;
        std::vector<std::pair<std::int64_t, double>> points;
        for (std::size_t i = 0; i < sizes.size(); ++i)
            points.emplace_back(sizes[i], pace * factors_[i] * curve_.of(static_cast<double>(sizes[i])));
        cost_ = std::make_shared<const Cost>(std::move(points));
    }
    return cost_;
}

} // namespace mars
