#include "decode/cost.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr int rounds = 5;           // each over all sizes, so that other load on the machine affects all of them
constexpr double max_seconds = 1.0; // seconds: no further round begins after them, so a large model is measured once
constexpr std::int64_t behind = 64; // KV entries before the measured slots

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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

Cost measure(Backend& backend, std::int64_t block, std::int64_t mask_id) {
    const std::int64_t most = std::min({4 * block, backend.max_slots().value_or(4 * block), backend.max_capacity()});
    // 2 x block - 1 slots is all masks: a block of tokens accepted in the last step, and masks for all predictions
    // but the first.
    std::set<std::int64_t> sizes{std::min(block, most), std::min(2 * block - 1, most), most};
    for (std::int64_t size = 1; size <= std::min(block, most); size *= 2) sizes.insert(size);
    const std::int64_t length = std::min(behind, backend.max_capacity() - most);
    const std::unique_ptr<Cache> cache = backend.new_cache(1);
    cache->reserve(length + most);
    StepOutput output;
    const auto timed = [&](std::int64_t slots) {
        const std::int64_t outputs = std::min(slots, backend.max_outputs().value_or(slots));
        StepInput input{1, slots, outputs, std::vector<std::int64_t>(static_cast<std::size_t>(slots), mask_id), {length}, {}};
        input.input_ids.front() = 0; // a step without masks may be cheaper than its slots
        // Each slot has an output, as in exact mode, up to the most that the backend has.
        for (std::int64_t i = slots - input.outputs; i < slots; ++i) input.output_index.push_back(i);
        const double begun = now();
        backend.step(*cache, 0, input, false, output);
        return std::max(now() - begun, 1e-9);
    };
    std::vector<std::pair<std::int64_t, double>> points;
    for (const std::int64_t size : sizes) {
        timed(size); // warm-up
        points.emplace_back(size, 0.0);
    }
    const double begun = now();
    for (int round = 0; round < rounds && (round == 0 || now() - begun <= max_seconds); ++round)
        for (auto& [size, seconds] : points) seconds = round == 0 ? timed(size) : std::min(seconds, timed(size));
    return Cost(std::move(points));
}

} // namespace mars
