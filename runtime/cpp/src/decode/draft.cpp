#include "decode/draft.hpp"

#include <mars/errors.hpp>

#include "accept.hpp"
#include "decode/sample.hpp"

namespace mars {

std::int64_t DraftSlots::id(std::int64_t position) const {
    const auto offset = splitmix64(0, static_cast<std::uint64_t>(position)) % static_cast<std::uint64_t>(high - low);
    return first + low + static_cast<std::int64_t>(offset);
}

void check_tau(double tau, Metric metric) {
    if (!is_one_token(tau, metric))
        throw SessionError("this bundle is a stock model with a draft adapter: its drafts were trained to be verified, so that the text is "
                           "the stock model's. Leave out tau; tau 1 is one token a step");
}

} // namespace mars
