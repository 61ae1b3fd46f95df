// Both acceptance rules of MARS, left to right. Their Python twins are in runtime/accept.py; tests/conformance holds them together.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/config.hpp>

namespace mars {

/// Whether `tau` means exactly one token a step, so that no masks are needed: tau >= 1, for entropy tau <= 0.
///
/// A rule of its own, because in floating point a confident probability rounds to exactly 1.0 (paper: tau = 1.0 is
/// ordinary one-token decoding).
bool is_one_token(double tau, Metric metric);

/// Probability or margin >= tau; entropy (nats) <= tau. NaN never passes.
bool passes(double confidence, double tau, Metric metric);

/// How many of the predictions to accept, from the left: 0 only if there are none or `limit` is 0.
///
/// The first always; then each next one while its confidence passes `tau`; none after an end-of-sequence token; at most
/// `limit`. `token_ids` and `confidences` have equal length, in position order.
std::int64_t accept(const std::vector<std::int64_t>& token_ids, const std::vector<double>& confidences, double tau, Metric metric,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit);

/// How many of the model's own next tokens stand, from the left: 0 only if there are none or `limit` is 0.
///
/// `token_ids[j]` is what the model itself says, one token at a time, behind the first j of `proposals`. The first always stands; each
/// next one while the proposal before it was that very token; none after an end-of-sequence token; at most `limit`. So what stands is the
/// one-token answer, whatever was proposed.
std::int64_t verify(const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& proposals,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit);

} // namespace mars
