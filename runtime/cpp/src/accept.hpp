// runtime/accept.py: the two acceptance rules of MARS. tests/conformance/accept.json compares them.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/config.hpp>

namespace mars {

/// Whether `token` is among `tokens`.
bool is_one_of(std::int64_t token, const std::vector<std::int64_t>& tokens);

/// Whether `tau` means exactly one token a step, so that no masks are fed: tau >= 1, or tau <= 0 for entropy.
///
/// A rule of its own, because a confident probability is rounded to exactly 1.0 in floating point (paper: tau = 1.0 is
/// ordinary one-token decoding).
bool is_one_token(double tau, Metric metric);

/// Probability or margin >= tau; entropy (nats) <= tau. NaN never passes.
bool passes(double confidence, double tau, Metric metric);

/// How many of the predictions to accept, from the left. 0 only if there are none or `limit` is 0.
///
/// The first is always accepted, each next one while its confidence passes `tau`. Nothing is accepted after an
/// end-of-sequence token, and at most `limit`. `token_ids` and `confidences` have equal length, in order of position.
std::int64_t accept(const std::vector<std::int64_t>& token_ids, const std::vector<double>& confidences, double tau, Metric metric,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit);

/// How many of the model's own next tokens to accept, from the left. 0 only if there are none or `limit` is 0.
///
/// `token_ids[j]` is what the model predicts after the first j of `draft_tokens`. The first is always accepted, each next
/// one if the draft token before it equals the prediction before it. Nothing is accepted after an end-of-sequence token,
/// and at most `limit`. The result is therefore the text of one token at a time, whatever was proposed.
std::int64_t verify(const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& draft_tokens,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit);

} // namespace mars
