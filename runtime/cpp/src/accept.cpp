// The acceptance rule: ten lines that decide.
#include <algorithm>

#include <mars/accept.hpp>

namespace mars {

std::string_view to_string(Metric metric) {
    switch (metric) {
    case Metric::margin:
        return "margin";
    case Metric::entropy:
        return "entropy";
    case Metric::probability:
        break;
    }
    return "probability";
}

bool is_one_token(double tau, Metric metric) { return metric == Metric::entropy ? tau <= 0.0 : tau >= 1.0; }

bool passes(double confidence, double tau, Metric metric) { return metric == Metric::entropy ? confidence <= tau : confidence >= tau; }

std::int64_t accept(const std::vector<std::int64_t>& token_ids, const std::vector<double>& confidences, double tau, Metric metric,
                    const std::vector<std::int64_t>& eos_ids, std::int64_t limit) {
    const auto ends = [&](std::int64_t token) { return std::find(eos_ids.begin(), eos_ids.end(), token) != eos_ids.end(); };
    const auto made = static_cast<std::int64_t>(token_ids.size());
    const std::int64_t most = std::min({limit, made, is_one_token(tau, metric) ? std::int64_t{1} : made});
    std::int64_t count = 0;
    while (count < most && (count == 0 || (passes(confidences[count], tau, metric) && !ends(token_ids[count - 1])))) ++count;
    return count;
}

} // namespace mars
