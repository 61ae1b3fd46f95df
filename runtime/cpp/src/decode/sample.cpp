// Sums are in double, those in Python in float32: the two agree to float32's last digits.
#include "decode/sample.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <mars/errors.hpp>

#include "decode/token_set.hpp"

namespace mars {

namespace {

std::int64_t draw(const float* logits, std::int64_t size, const GenerationConfig& config, double number) {
    // Tokens from the likeliest on, equal ones by id, sorted only as far as needed: a heap.
    const auto is_later = [&](std::int64_t a, std::int64_t b) { return logits[a] < logits[b] || (logits[a] == logits[b] && a > b); };
    std::vector<std::int64_t> ranking(static_cast<std::size_t>(size));
    std::iota(ranking.begin(), ranking.end(), std::int64_t{0});
    std::make_heap(ranking.begin(), ranking.end(), is_later);
    const auto take = [&] {
        std::pop_heap(ranking.begin(), ranking.end(), is_later);
        const std::int64_t token = ranking.back();
        ranking.pop_back();
        return token;
    };
    const double top = *std::max_element(logits, logits + size); // subtracted first, so that no temperature is too small
    const auto weight = [&](std::int64_t token) { return std::exp((logits[token] - top) / config.temperature); };
    std::vector<std::int64_t> kept;
    double total = 0.0;
    if (config.top_k > 0) {
        while (!ranking.empty() && static_cast<std::int64_t>(kept.size()) < config.top_k) kept.push_back(take());
        for (const std::int64_t token : kept) total += weight(token);
        ranking.clear();
    } else {
        for (std::int64_t token = 0; token < size; ++token) total += weight(token);
    }
    // Nucleus: the smallest set whose probability reaches top_p, at least one token. If nothing is cut off, stop where
    // the draw falls.
    const bool cuts = config.top_p < 1 || config.min_p > 0;
    const double enough = config.top_p < 1 ? config.top_p : cuts ? std::numeric_limits<double>::infinity() : std::nextafter(number, 2.0);
    std::vector<double> cumulative;
    for (std::size_t i = 0; cumulative.empty() || cumulative.back() < enough; ++i) {
        if (i == kept.size()) {
            if (ranking.empty()) break;
            kept.push_back(take());
        }
        if (weight(kept[i]) < config.min_p) break; // the likeliest has weight 1
        cumulative.push_back((cumulative.empty() ? 0.0 : cumulative.back()) + weight(kept[i]) / total);
    }
    const double whole = cuts ? cumulative.back() : 1.0;
    const auto position =
        std::upper_bound(cumulative.begin(), cumulative.end(), number, [&](double value, double sum) { return value < sum / whole; });
    return kept[static_cast<std::size_t>(std::min(position, cumulative.end() - 1) - cumulative.begin())];
}

std::vector<float> penalized(const float* logits, std::int64_t size, double penalty, std::vector<std::int64_t> seen) {
    std::vector<float> changed(logits, logits + size);
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    using Limits = std::numeric_limits<float>; // any penalty yields finite numbers
    const auto factor = static_cast<float>(std::clamp(penalty, double{Limits::min()}, double{Limits::max()}));
    for (const std::int64_t token : seen) {
        float& logit = changed[static_cast<std::size_t>(token)];
        logit = std::clamp(logit > 0 ? logit / factor : logit * factor, Limits::lowest(), Limits::max());
    }
    return changed;
}

} // namespace

std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t position) {
    std::uint64_t z = seed + (position + 1) * 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
}

double uniform(std::uint64_t seed, std::uint64_t position) {
    return static_cast<double>(splitmix64(seed, position) >> 11U) / 9007199254740992.0; // 2**53
}

void check_numbers(const float* logits, std::int64_t vocab_size) {
    bool is_number = true;
    float top = -std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < vocab_size; ++i) {
        is_number &= logits[i] == logits[i];
        top = std::max(top, logits[i]);
    }
    if (!is_number || std::isinf(top))
        throw DeviceError("the model's logits are not numbers (NaN or infinite), so no token can be chosen; export the bundle again");
}

Choice choose(const float* logits, std::int64_t vocab_size, const GenerationConfig& config, const std::vector<std::int64_t>& seen,
              std::int64_t position, const TokenSet* allowed) {
    check_numbers(logits, vocab_size);
    std::vector<float> changed, masked;
    if (config.repetition_penalty != 1) {
        changed = penalized(logits, vocab_size, config.repetition_penalty, seen);
        logits = changed.data();
    }
    const float* among = logits;
    if (allowed != nullptr) {
        masked.assign(logits, logits + vocab_size);
        for (std::int64_t id = 0; id < vocab_size; ++id)
            if (!allowed->has(id)) masked[static_cast<std::size_t>(id)] = -std::numeric_limits<float>::infinity();
        among = masked.data();
    }
    const std::int64_t token = config.is_greedy()
                                   ? std::max_element(among, among + vocab_size) - among
                                   : draw(among, vocab_size, config, uniform(config.seed, static_cast<std::uint64_t>(position)));
    return {token, confidence_of(logits, vocab_size, token, config.metric)};
}

double confidence_of(const float* logits, std::int64_t vocab_size, std::int64_t token, Metric metric) {
    const double top = *std::max_element(logits, logits + vocab_size);
    double total = 0.0, best_other = 0.0, moment = 0.0;
    for (std::int64_t i = 0; i < vocab_size; ++i) {
        const double weight = std::exp(logits[i] - top);
        total += weight;
        if (i != token) best_other = std::max(best_other, weight);
        if (weight > 0) moment += weight * (logits[i] - top);
    }
    if (metric == Metric::entropy) return static_cast<float>(std::log(total) - moment / total);
    const double own = std::exp(logits[token] - top);
    return static_cast<float>((metric == Metric::probability ? own : own - best_other) / total);
}

} // namespace mars
