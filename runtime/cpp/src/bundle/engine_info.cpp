#include "bundle/engine_info.hpp"

#include <algorithm>
#include <sys/utsname.h>

#include "joined.hpp"

namespace mars {

std::optional<std::size_t> EngineInfo::range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const {
    for (std::size_t i = 0; i < ranges.size(); ++i)
        if (ranges[i].batch.holds(rows) && ranges[i].slots.holds(slots) && ranges[i].outputs.holds(outputs)) return i;
    return std::nullopt;
}

std::int64_t EngineInfo::largest(Extent Range::* dimension) const {
    std::int64_t most = 0;
    for (const Range& range : ranges) most = std::max(most, (range.*dimension).max);
    return most;
}

std::string this_platform() {
    utsname names{};
    uname(&names);
    return lower(std::string(names.sysname) + "-" + names.machine);
}

} // namespace mars
