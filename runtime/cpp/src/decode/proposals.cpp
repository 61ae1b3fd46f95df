// Same constants and order of operations as runtime/decode/pace/estimates.py, so that doubles are rounded alike.
#include "decode/proposals.hpp"

#include <algorithm>
#include <numeric>

namespace mars {

namespace {

constexpr std::array<double, 7> edges{0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.995}; // classes of confidence
constexpr double own_word = 16.0;                                              // weight of the confidence itself, in verified proposals
constexpr double fade = 0.99;                                                  // factor for all counts at each verifying step
constexpr double keep = 0.75;                                                  // factor for older steps' masks
constexpr double first = 0.5;                                                  // prior for masks, counted as one mask
constexpr std::int64_t most_looked_up = 32;                                    // tokens of one lookup
constexpr double lookup_confidence = 0.6; // of a token that followed the same tokens before; the counts correct it

double number(double confidence) { return confidence > 0 ? confidence : 0.0; }

std::size_t class_of(double confidence) {
    return static_cast<std::size_t>(std::upper_bound(edges.begin(), edges.end(), number(confidence)) - edges.begin());
}

} // namespace

double Hopes::of(Source source, double confidence) const {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto [tried, held] = counts_[static_cast<std::size_t>(source)][class_of(confidence)];
    return (held + own_word * std::min(number(confidence), 1.0)) / (tried + own_word);
}

std::vector<double> Hopes::of_all(const Proposals& proposals) const {
    std::vector<double> hopes;
    for (std::int64_t i = 0; i < proposals.size(); ++i)
        hopes.push_back(proposals.is_sure(i) ? 1.0 : of(proposals.source, proposals.confidences[static_cast<std::size_t>(i)]));
    return hopes;
}

void Hopes::saw(const Proposals& proposals, std::int64_t num_fed, std::int64_t num_held) {
    if (num_fed == proposals.num_sure(num_fed)) return;
    const std::lock_guard<std::mutex> guard(lock_);
    for (auto& classes : counts_) {
        for (Count& count : classes) count = {count.tried * fade, count.held * fade};
    }
    for (std::int64_t i = 0; i < std::min(num_held + 1, num_fed); ++i) {
        if (proposals.is_sure(i)) continue;
        const double confidence = proposals.confidences[static_cast<std::size_t>(i)];
        Count& count = counts_[static_cast<std::size_t>(proposals.source)][class_of(confidence)];
        count.tried += 1.0;
        count.held += i < num_held ? 1.0 : 0.0;
    }
}

void Foresight::saw(const std::vector<double>& hopes) {
    seen_.resize(std::max(seen_.size(), hopes.size()));
    hoped_.resize(seen_.size());
    for (std::size_t k = 0; k < hopes.size(); ++k) {
        seen_[k] = seen_[k] * keep + 1.0;
        hoped_[k] = hoped_[k] * keep + hopes[k];
    }
}

std::vector<double> Foresight::expected(std::int64_t most) const {
    const double hoped = std::accumulate(hoped_.begin(), hoped_.end(), 0.0), seen = std::accumulate(seen_.begin(), seen_.end(), 0.0);
    const double level = (hoped + first) / (seen + 1.0);
    std::vector<double> total{0.0};
    double chance = 1.0;
    for (std::size_t k = 0; static_cast<std::int64_t>(k) < most; ++k) {
        const bool is_known = k < seen_.size();
        chance *= ((is_known ? hoped_[k] : 0.0) + level) / ((is_known ? seen_[k] : 0.0) + 1.0);
        total.push_back(total.back() + chance);
    }
    return total;
}

Proposals Lookup::propose(const std::vector<std::int64_t>& tokens, std::int64_t most) {
    const auto size = static_cast<std::int64_t>(tokens.size());
    const auto before = [&](std::int64_t end) { return std::vector(tokens.begin() + (end - length_), tokens.begin() + end); };
    // The last tokens themselves are not indexed yet, so a match is an earlier occurrence.
    for (std::int64_t end = std::max(indexed_, length_); end < size; ++end) after_[before(end)] = end;
    indexed_ = std::max(indexed_, size);
    const auto found = size >= length_ ? after_.find(before(size)) : after_.end();
    if (found == after_.end()) return {};
    const std::int64_t count = std::min({most, most_looked_up, size - found->second});
    const auto at = tokens.begin() + found->second;
    return {{at, at + count}, std::vector<double>(static_cast<std::size_t>(count), lookup_confidence), Source::lookup};
}

} // namespace mars
