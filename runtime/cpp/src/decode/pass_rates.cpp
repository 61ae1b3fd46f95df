// Same constants and order of operations as runtime/decode/pace/estimates.py; tests/conformance/windows.json compares them.
#include "decode/pass_rates.hpp"

#include <algorithm>
#include <numeric>

namespace mars {

namespace {

constexpr double keep = 0.98;  // weight of an older observation after each newer one of the same prediction
constexpr double first = 0.5;  // prior pass rate of masks, counted as one observation
constexpr double belief = 1.0; // weight of the mean over all masks, in observations of one mask
constexpr double missed = 0.7; // factor for a position that was predicted in the previous step and did not pass

} // namespace

void PassRates::saw(std::int64_t accepted, const std::vector<bool>& passed) {
    tried_.resize(std::max(tried_.size(), passed.size()));
    passed_.resize(tried_.size());
    for (std::size_t k = 0; k < passed.size(); ++k) {
        tried_[k] = tried_[k] * keep + 1.0;
        passed_[k] = passed_[k] * keep + (passed[k] ? 1.0 : 0.0);
    }
    const auto behind = std::min(static_cast<std::ptrdiff_t>(accepted) + 1, static_cast<std::ptrdiff_t>(passed.size()));
    behind_.assign(passed.begin() + behind, passed.end());
}

std::vector<double> PassRates::expected(std::int64_t masks) const {
    const double seen = std::accumulate(tried_.begin() + 1, tried_.end(), 0.0);
    const double good = std::accumulate(passed_.begin() + 1, passed_.end(), 0.0);
    const double level = (good + first) / (seen + 1.0);
    std::vector<double> tokens{1.0};
    double chance = 1.0;
    for (std::size_t k = 1; static_cast<std::int64_t>(k) <= masks; ++k) {
        const double tried = k < tried_.size() ? tried_[k] : 0.0, passed = k < tried_.size() ? passed_[k] : 0.0;
        const double share = (passed + belief * level) / (tried + belief);
        chance *= k > behind_.size() || behind_[k - 1] ? share : share * missed;
        tokens.push_back(tokens.back() + chance);
    }
    return tokens;
}

double PassRates::certainty() const { return (passed_[0] + 1.0) / (tried_[0] + 1.0); }

} // namespace mars
