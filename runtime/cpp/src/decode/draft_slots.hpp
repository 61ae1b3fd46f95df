// runtime/decode/speculation/draft_slots.py: inputs that take the place of masks if a bundle has draft adapters.
#pragma once

#include <cstdint>
#include <vector>

#include <mars/config.hpp>
#include <mars/errors.hpp>

#include "accept.hpp"
#include "decode/sample.hpp"

namespace mars {

/// What the draft slots of one adapter feed. `first` is the input of token 0 there; token ids are from `low` up to, but not
/// including, `high`.
struct DraftSlots {
    std::int64_t first, low, high;

    /// Of the adapter with this number, from 0.
    static DraftSlots of(std::int64_t adapter, std::int64_t vocab_size, std::int64_t low, std::int64_t high) {
        return {vocab_size * (1 + adapter), low, high};
    }

    /// The inputs of `count` slots from `position` of the sequence on. They depend on nothing else, so that a text can be repeated.
    std::vector<std::int64_t> ids(std::int64_t position, std::int64_t count) const {
        std::vector<std::int64_t> ids;
        for (std::int64_t p = position; p < position + count; ++p) {
            const auto offset = splitmix64(0, static_cast<std::uint64_t>(p)) % static_cast<std::uint64_t>(high - low);
            ids.push_back(first + low + static_cast<std::int64_t>(offset));
        }
        return ids;
    }
};

/// Throws SessionError for a tau that accepts drafts without verification.
inline void check_tau(double tau, Metric metric) {
    if (!is_one_token(tau, metric))
        throw SessionError("this bundle is a stock model with a draft adapter: its drafts were trained to be verified, so that the text is "
                           "the stock model's. Leave out tau; tau 1 is one token a step");
}

} // namespace mars
