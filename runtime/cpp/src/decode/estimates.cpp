// The same order of operations as in Python, so that doubles are rounded alike.
#include "decode/estimates.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace mars {

namespace {

constexpr double first_rate = 0.5; // of a mask before any observation; counts as one observation
constexpr double pass_keep = 0.98; // weight of an older observation of the next token after a newer one
constexpr double missed = 0.7;     // factor for a position that was predicted in the previous step and did not pass

constexpr std::array<double, 7> edges{0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.995}; // classes of confidence
constexpr double outcome_share = 1.0 / 24; // of the way to 0 or 1 by which one outcome moves acceptance probabilities
constexpr std::size_t last_prompts = 8;    // the last ones, which tell what the masks of the next prompt will bring

double number(double confidence) { return confidence > 0 ? confidence : 0.0; }

std::size_t class_of(double confidence) {
    return static_cast<std::size_t>(std::upper_bound(edges.begin(), edges.end(), number(confidence)) - edges.begin());
}

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

} // namespace

std::vector<double> expected_run(const std::vector<double>& probabilities, double first) {
    std::vector<double> expected{first};
    double all = 1.0;
    for (const double probability : probabilities) {
        all *= probability;
        expected.push_back(expected.back() + all);
    }
    return expected;
}

void MaskRates::record(const std::vector<double>& values) {
    weights_.resize(std::max(weights_.size(), values.size()));
    sums_.resize(weights_.size());
    for (std::size_t k = 0; k < values.size(); ++k) {
        weights_[k] = weights_[k] * keep_ + 1.0;
        sums_[k] = sums_[k] * keep_ + values[k];
    }
}

std::vector<double> MaskRates::rates(std::int64_t masks) const {
    const double mean = (sum(sums_) + first_rate) / (sum(weights_) + 1.0);
    std::vector<double> rates(static_cast<std::size_t>(masks), mean);
    for (std::size_t k = 0; k < std::min(rates.size(), sums_.size()); ++k) {
        const double first = 1.0 - (1.0 - keep_) * weights_[k];
        rates[k] = (sums_[k] + first * mean) / (weights_[k] + first);
    }
    return rates;
}

void PassRates::record(std::int64_t accepted, const std::vector<bool>& passed) {
    tried_ = tried_ * pass_keep + 1.0;
    passed_ = passed_ * pass_keep + (passed.front() ? 1.0 : 0.0);
    masks_.record({passed.begin() + 1, passed.end()});
    last_passed_.assign(passed.begin() + std::min<std::ptrdiff_t>(accepted + 1, static_cast<std::ptrdiff_t>(passed.size())), passed.end());
}

std::vector<double> PassRates::expected(std::int64_t masks) const {
    std::vector<double> rates = masks_.rates(masks);
    for (std::size_t k = 0; k < std::min(rates.size(), last_passed_.size()); ++k)
        if (!last_passed_[k]) rates[k] *= missed;
    return expected_run(rates, 1.0);
}

double AcceptanceRates::probability(Source source, double confidence) const {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto [weight, accepted] = estimates_[static_cast<std::size_t>(source)][class_of(confidence)];
    return weight * std::min(number(confidence), 1.0) + accepted;
}

std::vector<double> AcceptanceRates::probabilities(const DraftTokens& draft_tokens) const {
    std::vector<double> probabilities;
    for (std::int64_t i = 0; i < draft_tokens.size(); ++i)
        probabilities.push_back(
            draft_tokens.is_forced(i) ? 1.0 : probability(draft_tokens.source, draft_tokens.confidences[static_cast<std::size_t>(i)]));
    return probabilities;
}

void AcceptanceRates::record(const DraftTokens& draft_tokens, const std::vector<std::int64_t>& token_ids) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (std::size_t i = 0; i < std::min(draft_tokens.token_ids.size(), token_ids.size()); ++i) {
        if (draft_tokens.is_forced(static_cast<std::int64_t>(i))) continue;
        Estimate& estimate = estimates_[static_cast<std::size_t>(draft_tokens.source)][class_of(draft_tokens.confidences[i])];
        const double share = draft_tokens.token_ids[i] == token_ids[i] ? outcome_share : 0.0;
        estimate = {(1.0 - outcome_share) * estimate.weight, (1.0 - outcome_share) * estimate.accepted + share};
    }
}

void AcceptanceRates::record_prompt(const std::vector<double>& probabilities) {
    const std::lock_guard<std::mutex> guard(lock_);
    if (prompts_.size() == last_prompts) prompts_.erase(prompts_.begin());
    prompts_.push_back(sum(probabilities) / static_cast<double>(probabilities.size()));
}

std::vector<double> AcceptanceRates::expected_of_prompt(std::int64_t masks) const {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto num_masks = static_cast<std::size_t>(masks);
    std::vector<double> expected(num_masks + 1);
    for (const double mean : prompts_) {
        const std::vector<double> run = expected_run(std::vector<double>(num_masks, mean));
        std::transform(run.begin(), run.end(), expected.begin(), expected.begin(), std::plus<>());
    }
    for (double& value : expected) value /= static_cast<double>(prompts_.size());
    return expected;
}

} // namespace mars
