// What a row feeds into one step. Knows no tokens.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mars {

/// From a row's cursor on: `known` tokens, then `proposals` of it, then `masks` masks.
///
/// Outputs are asked of the last known token, of every proposal and of every mask, in this order.
struct Feed {
    std::int64_t known = 0, proposals = 0, masks = 0;

    std::int64_t slots() const { return known + proposals + masks; }
    std::int64_t outputs() const { return std::min(known, std::int64_t{1}) + proposals + masks; }
};

} // namespace mars
