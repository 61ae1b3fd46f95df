#include "bundle/engine_info.hpp"

#include <algorithm>
#include <cctype>
#include <sys/utsname.h>

namespace mars {

namespace {

std::int64_t largest(const std::vector<Range>& ranges, Extent Range::* dimension) {
    std::int64_t most = 0;
    for (const Range& range : ranges) most = std::max(most, (range.*dimension).max);
    return most;
}

} // namespace

std::optional<std::size_t> EngineInfo::range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const {
    for (std::size_t i = 0; i < ranges.size(); ++i)
        if (ranges[i].batch.holds(rows) && ranges[i].slots.holds(slots) && ranges[i].outputs.holds(outputs)) return i;
    return std::nullopt;
}

std::int64_t EngineInfo::max_rows() const { return largest(ranges, &Range::batch); }

std::int64_t EngineInfo::max_slots() const { return largest(ranges, &Range::slots); }

std::int64_t EngineInfo::max_outputs() const { return largest(ranges, &Range::outputs); }

std::string this_platform() {
    utsname names{};
    uname(&names);
    std::string text = std::string(names.sysname) + "-" + names.machine;
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

} // namespace mars
