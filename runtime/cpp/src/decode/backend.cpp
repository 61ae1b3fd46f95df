#include "decode/backend.hpp"

#include <algorithm>

namespace mars {

std::int64_t bucket(std::int64_t needed, std::int64_t present) {
    const std::int64_t target = std::max(needed, present + present / 4);
    return (target + growth - 1) / growth * growth;
}

} // namespace mars
