#include <algorithm>
#include <cctype>
#include <sys/utsname.h>

#include "bundle/engine_fields.hpp"

namespace mars {

namespace {

constexpr std::int64_t longest_extent = std::int64_t{1} << 20;
constexpr std::size_t most_ranges = 64;

std::int64_t largest(const std::vector<Range>& ranges, Extent Range::* dimension) {
    std::int64_t most = 0;
    for (const Range& range : ranges) most = std::max(most, (range.*dimension).max);
    return most;
}

Extent read_extent(Fields fields) {
    const Extent extent{fields.integer("min", 1, longest_extent), fields.integer("opt", 1, longest_extent),
                        fields.integer("max", 1, longest_extent)};
    if (extent.min > extent.opt || extent.opt > extent.max)
        fields.wrong("", "min " + std::to_string(extent.min) + ", opt " + std::to_string(extent.opt) + ", max " +
                             std::to_string(extent.max) + " are not in order");
    return extent;
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

EngineInfo read_engine(Fields fields) {
    EngineInfo info;
    for (Fields& range : fields.objects("ranges", most_ranges))
        info.ranges.push_back({range.text("name", {"decode", "prefill"}), read_extent(range.object("batch")),
                               read_extent(range.object("slots")), read_extent(range.object("outputs"))});
    if (info.ranges.empty()) fields.wrong("ranges", "at least one is expected");
    info.version = fields.text("version");
    info.cuda = fields.text("cuda");
    info.platform = fields.text("platform");
    info.compute_capabilities = fields.texts("compute_capabilities");
    info.graph = fields.text("graph");
    if (fields.has("tf32")) info.tf32 = fields.flag("tf32");
    return info;
}

} // namespace mars
