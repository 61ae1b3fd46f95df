// The constants are those of runtime/acceptance.py; tests/conformance/windows.json holds both together.
#include <algorithm>

#include <mars/acceptance.hpp>

namespace mars {

namespace {

constexpr double keep = 0.97;  // what an older observation counts after a newer one of the same mask
constexpr double first = 0.5;  // believed of the first mask before anything was seen
constexpr double rise = 0.3;   // a mask whose predecessor was accepted is believed to be this much nearer to certain than that one
constexpr double belief = 0.5; // observations that a belief counts for

} // namespace

void Acceptance::saw(std::int64_t accepted, std::int64_t masks) {
    const auto size = static_cast<std::size_t>(std::max(masks, std::int64_t{0}));
    tried_.resize(std::max(tried_.size(), size));
    accepted_.resize(tried_.size());
    for (std::int64_t k = 0; k < std::min(accepted, masks); ++k) {
        const auto i = static_cast<std::size_t>(k);
        tried_[i] = tried_[i] * keep + 1.0;
        accepted_[i] = accepted_[i] * keep + (k + 1 < accepted ? 1.0 : 0.0);
    }
}

std::vector<double> Acceptance::expected(std::int64_t masks) const {
    std::vector<double> tokens{1.0};
    double chance = 1.0, believed = first;
    for (std::size_t k = 0; static_cast<std::int64_t>(k) < masks; ++k) {
        const double tried = k < tried_.size() ? tried_[k] : 0.0, accepted = k < tried_.size() ? accepted_[k] : 0.0;
        const double share = (accepted + belief * believed) / (tried + belief);
        chance *= share;
        tokens.push_back(tokens.back() + chance);
        believed = share + rise * (1.0 - share);
    }
    return tokens;
}

} // namespace mars
