// runtime/accept.py: the two acceptance rules of MARS. tests/conformance/accept.json compares them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <mars/config.hpp>

namespace mars {

template <typename Value, typename Values>
bool is_one_of(const Value& value, const Values& values) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

/// Whether `tau` means exactly one token a step, so that no masks are fed: tau >= 1, or tau <= 0 for entropy.
///
/// A rule of its own, because a confident probability is rounded to exactly 1.0 in floating point (paper: tau = 1.0 is
/// ordinary one-token decoding).
inline bool is_one_token(double tau, Metric metric) { return metric == Metric::entropy ? tau <= 0.0 : tau >= 1.0; }

/// Probability or margin >= tau; entropy (nats) <= tau. NaN never passes.
inline bool passes(double confidence, double tau, Metric metric) {
    return metric == Metric::entropy ? confidence <= tau : confidence >= tau;
}

/// How many of the predictions to accept, from the left. 0 only if there are none or `limit` is 0.
///
/// The first is always accepted, each next one while its confidence passes `tau`. Nothing is accepted after an
/// end-of-sequence token, and at most `limit`. `token_ids` and `confidences` have equal length, in order of position.
inline std::int64_t accept(const std::vector<std::int64_t>& token_ids, const std::vector<double>& confidences, double tau, Metric metric,
                           const std::vector<std::int64_t>& eos_ids, std::int64_t limit) {
    const auto num = static_cast<std::int64_t>(token_ids.size());
    const std::int64_t most = std::min({limit, num, is_one_token(tau, metric) ? std::int64_t{1} : num});
    std::int64_t count = 0;
    while (count < most && (count == 0 || (passes(confidences[count], tau, metric) && !is_one_of(token_ids[count - 1], eos_ids)))) ++count;
    return count;
}

/// How many of the model's own next tokens to accept, from the left. 0 only if there are none or `limit` is 0.
///
/// `token_ids[j]` is what the model predicts after the first j of `draft_tokens`. The first is always accepted, each next
/// one if the draft token before it equals the prediction before it. Nothing is accepted after an end-of-sequence token,
/// and at most `limit`. The result is therefore the text of one token at a time, whatever was proposed.
inline std::int64_t verify(const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& draft_tokens,
                           const std::vector<std::int64_t>& eos_ids, std::int64_t limit) {
    const auto num = static_cast<std::int64_t>(token_ids.size()), proposed = static_cast<std::int64_t>(draft_tokens.size());
    const std::int64_t most = std::min({limit, num, proposed + 1});
    std::int64_t count = 0;
    while (count < most && (count == 0 || (token_ids[count - 1] == draft_tokens[count - 1] && !is_one_of(token_ids[count - 1], eos_ids))))
        ++count;
    return count;
}

} // namespace mars
