// Sums are in double, those in Python in float32: the two agree to float32's last digits.
#include "decode/sample.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include <mars/errors.hpp>

#include "decode/token_set.hpp"

namespace mars {

namespace {

constexpr double reach = 8.0;       // a draw first looks at logits that are this many temperatures below the largest
constexpr std::size_t sorted = 512; // tokens that a draw sorts; of more it selects

struct Weighted {
    float logit;
    std::int64_t id;
    double weight;
};

bool is_earlier(const Weighted& a, const Weighted& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

double sum_of(std::vector<Weighted>::const_iterator begin, std::vector<Weighted>::const_iterator end) {
    return std::accumulate(begin, end, 0.0, [](double sum, const Weighted& each) { return sum + each.weight; });
}

/// The first of `tokens`, sorted from the likeliest on, equal ones by id, with which the sum of the weights is greater than
/// `sum_before`, or else the last one; and that sum. Takes linear time.
std::pair<std::int64_t, double> find(std::vector<Weighted>& tokens, double sum_before, double near) {
    auto begin = tokens.begin(), end = tokens.end();
    auto middle = std::partition(begin, end, [&](const Weighted& each) { return each.logit >= near; });
    double skipped = 0.0;
    while (true) {
        if (const double upper = sum_of(begin, middle); skipped + upper > sum_before) {
            end = middle;
        } else if (middle != end) {
            skipped += upper;
            begin = middle;
        }
        if (static_cast<std::size_t>(end - begin) <= sorted) break;
        middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, is_earlier);
    }
    std::sort(begin, end, is_earlier);
    for (; begin + 1 != end && skipped + begin->weight <= sum_before; ++begin) skipped += begin->weight;
    return {begin->id, skipped + begin->weight};
}

std::int64_t draw(const float* logits, std::int64_t size, const GenerationConfig& config, double number) {
    const double top = *std::max_element(logits, logits + size); // subtracted first, so that no temperature is too small
    std::vector<Weighted> tokens;
    tokens.reserve(static_cast<std::size_t>(size));
    for (std::int64_t id = 0; id < size; ++id)
        if (logits[id] >= std::numeric_limits<float>::lowest()) // leaves out tokens that are not allowed
            tokens.push_back({logits[id], id, 0.0});
    if (config.top_k > 0 && config.top_k < static_cast<std::int64_t>(tokens.size())) {
        std::nth_element(tokens.begin(), tokens.begin() + config.top_k, tokens.end(), is_earlier);
        tokens.resize(static_cast<std::size_t>(config.top_k));
    }
    for (Weighted& each : tokens) each.weight = std::exp((each.logit - top) / config.temperature);
    const double total = sum_of(tokens.begin(), tokens.end()), near = top - reach * config.temperature;
    double whole = total;
    if (config.top_p < 1) // nucleus: the smallest set with this probability; always at least one token
        whole = find(tokens, std::nextafter(config.top_p, 0.0) * total, near).second;
    if (config.min_p > 0) { // the likeliest has weight 1
        double likely = 0.0;
        for (const Weighted& each : tokens) likely += each.weight >= config.min_p ? each.weight : 0.0;
        whole = std::min(whole, likely);
    }
    return find(tokens, number * whole, near).first;
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
