// Ranges of a text.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mars {

/// [begin, end) in bytes, sorted and without overlaps.
using Spans = std::vector<std::pair<std::size_t, std::size_t>>;

} // namespace mars
