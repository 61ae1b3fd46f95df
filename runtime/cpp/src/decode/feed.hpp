// What one row feeds into a step.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mars {

/// From the row's cursor on: `known` pending tokens, then `proposals`, then `masks`.
///
/// Outputs are requested for the last pending token, every proposal and every mask, in this order.
struct Feed {
    std::int64_t known = 0, proposals = 0, masks = 0;

    std::int64_t slots() const { return known + proposals + masks; }
    std::int64_t outputs() const { return std::min(known, std::int64_t{1}) + proposals + masks; }
};

} // namespace mars
