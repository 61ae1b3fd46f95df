#include "accept.hpp"

#include <algorithm>

namespace mars {

bool is_one_of(std::int64_t token, const std::vector<std::int64_t>& tokens) {
    return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

bool is_one_token(double tau, Metric metric) { return metric == Metric::entropy ? tau <= 0.0 : tau >= 1.0; }

bool passes(double confidence, double tau, Metric metric) { return metric == Metric::entropy ? confidence <= tau : confidence >= tau; }

std::int64_t accept(const std::vector<std::int64_t>& token_ids, const std::vector<double>& confidences, double tau, Metric metric,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit) {
    const auto num = static_cast<std::int64_t>(token_ids.size());
    const std::int64_t most = std::min({limit, num, is_one_token(tau, metric) ? std::int64_t{1} : num});
    std::int64_t count = 0;
    while (count < most && (count == 0 || (passes(confidences[count], tau, metric) && !is_one_of(token_ids[count - 1], eos_ids)))) ++count;
    return count;
}

std::int64_t verify(const std::vector<std::int64_t>& token_ids, const std::vector<std::int64_t>& draft_tokens,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit) {
    const auto num = static_cast<std::int64_t>(token_ids.size()), proposed = static_cast<std::int64_t>(draft_tokens.size());
    const std::int64_t most = std::min({limit, num, proposed + 1});
    std::int64_t count = 0;
    while (count < most && (count == 0 || (token_ids[count - 1] == draft_tokens[count - 1] && !is_one_of(token_ids[count - 1], eos_ids))))
        ++count;
    return count;
}

} // namespace mars
