// Draft slots, which take the place of masks if a bundle has draft adapters over a stock model.
#pragma once

#include <cstdint>

#include <mars/config.hpp>

namespace mars {

/// What the draft slots of one adapter feed. `first` is the input of token 0 there; token ids are from `low` up to, but
/// not including, `high`.
struct DraftSlots {
    std::int64_t first, low, high;

    /// The input of the slot at `position` of the sequence. It depends on nothing else, so that a text can be repeated.
    std::int64_t id(std::int64_t position) const;
};

/// Throws SessionError for a tau that accepts drafts without verification.
void check_tau(double tau, Metric metric);

} // namespace mars
