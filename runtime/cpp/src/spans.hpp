// Spans of a text.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mars {

/// From where to where, in bytes; sorted, and none overlaps another.
using Spans = std::vector<std::pair<std::size_t, std::size_t>>;

} // namespace mars
