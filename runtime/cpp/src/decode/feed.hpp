// What one row feeds into a step.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mars {

/// From the row's cursor on: `pending` tokens, then `proposals`, then `masks`.
///
/// Outputs are requested for the last pending token, every proposal and every mask, in this order.
struct Feed {
    std::int64_t pending = 0, proposals = 0, masks = 0;

    std::int64_t slots() const { return pending + proposals + masks; }
    std::int64_t outputs() const { return std::min(pending, std::int64_t{1}) + proposals + masks; }
};

} // namespace mars
