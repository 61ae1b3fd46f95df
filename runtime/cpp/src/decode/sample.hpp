// runtime/decode/sample.py: choosing tokens from logits: repetition penalty, temperature, top-k, top-p, min-p, draws.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/config.hpp>

namespace mars {

class TokenSet;

/// Output `position` of Vigna's generator of that name.
std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t position);

/// A number in [0, 1) that depends on `seed` and `position` only, so that a draw does not depend on the run length.
double uniform(std::uint64_t seed, std::uint64_t position);

/// Throws DeviceError if one of `logits` [vocab_size] is not a number, or the largest is infinite.
void check_numbers(const float* logits, std::int64_t vocab_size);

struct Choice {
    std::int64_t token;
    double confidence;
};

/// Choose the token for absolute `position` from `logits` [vocab_size], and compute its confidence.
///
/// The repetition penalty (as in CTRL: divide positive logits of `seen` tokens, multiply negative ones) belongs to the
/// model's distribution, from which the confidence is computed. Temperature, top-k and top-p only shape the draw. If
/// `allowed` is not null, only its tokens are chosen.
Choice choose(const float* logits, std::int64_t vocab_size, const GenerationConfig& config, const std::vector<std::int64_t>& seen,
              std::int64_t position, const TokenSet* allowed = nullptr);

/// Probability of `token`, its margin over the best other token, or the entropy (nats), from `logits` [vocab_size];
/// rounded to float32.
double confidence_of(const float* logits, std::int64_t vocab_size, std::int64_t token, Metric metric);

} // namespace mars
