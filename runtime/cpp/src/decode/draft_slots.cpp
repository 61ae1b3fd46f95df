#include "decode/draft_slots.hpp"

#include <mars/errors.hpp>

#include "accept.hpp"
#include "decode/sample.hpp"

namespace mars {

std::vector<std::int64_t> DraftSlots::ids(std::int64_t position, std::int64_t count) const {
    std::vector<std::int64_t> ids;
    for (std::int64_t p = position; p < position + count; ++p) {
        const auto offset = splitmix64(0, static_cast<std::uint64_t>(p)) % static_cast<std::uint64_t>(high - low);
        ids.push_back(first + low + static_cast<std::int64_t>(offset));
    }
    return ids;
}

void check_tau(double tau, Metric metric) {
    if (!is_one_token(tau, metric))
        throw SessionError("this bundle is a stock model with a draft adapter: its drafts were trained to be verified, so that the text is "
                           "the stock model's. Leave out tau; tau 1 is one token a step");
}

} // namespace mars
