// What Linux says of itself in files.
#include "machine.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

namespace mars {

namespace {

std::optional<std::int64_t> number(const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end != text.data() ? std::optional(value) : std::nullopt;
}

std::string content(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

/// The number that is all of a file.
std::optional<std::int64_t> number_in(const std::filesystem::path& path) {
    std::string text = content(path);
    text.resize(text.find_last_not_of(" \t\r\n") + 1);
    return text.find_first_not_of("0123456789") == std::string::npos ? number(text) : std::nullopt;
}

/// The bytes of a line such as `MemAvailable:  123 kB`.
std::optional<std::int64_t> kilobytes(const std::filesystem::path& path, std::string_view name) {
    std::ifstream file(path);
    for (std::string found, value, unit; file >> found >> value && std::getline(file, unit);)
        if (found == name) {
            const auto thousands = number(value);
            return thousands ? std::optional(*thousands * 1024) : std::nullopt;
        }
    return std::nullopt;
}

/// Bytes of files that a control group has in memory: version 1 has its own first, and then with all groups below.
std::int64_t cached(const std::filesystem::path& group) {
    std::ifstream file(group / "memory.stat");
    std::int64_t before = 0, last = 0;
    std::string value;
    for (std::string name; file >> name >> value;) {
        if (name.rfind("total_", 0) == 0) name.erase(0, 6);
        if (name != "active_file" && name != "inactive_file") continue;
        before = last;
        last = number(value).value_or(0);
    }
    return before + last;
}

/// Files of a control group, by the version of its tree: the limit, what is used, and the limit of swap.
struct GroupFiles {
    const char *most, *used, *swap;
};
constexpr GroupFiles version_1{"memory.limit_in_bytes", "memory.usage_in_bytes", "-"};
constexpr GroupFiles version_2{"memory.max", "memory.current", "memory.swap.max"};
constexpr std::int64_t no_limit = std::int64_t{1} << 60; // version 1 says none by a number as large as it can

std::optional<std::int64_t> least(std::optional<std::int64_t> one, std::optional<std::int64_t> other) {
    return one && other ? std::min(*one, *other) : one ? one : other;
}

/// What one group leaves.
std::optional<std::int64_t> left_of(const std::filesystem::path& group, const GroupFiles& names, const MemoryFiles& files) {
    const auto most = number_in(group / names.most), used = number_in(group / names.used);
    if (!most || !used || *most >= no_limit) return std::nullopt;
    const std::int64_t swap = kilobytes(files.machine, "SwapFree:").value_or(0);
    return *most - *used + cached(group) + least(swap, number_in(group / names.swap)).value_or(0);
}

bool has_word(const std::string& words, std::string_view word) {
    std::istringstream list(words);
    for (std::string each; std::getline(list, each, ',');)
        if (each == word) return true;
    return false;
}

} // namespace

std::optional<std::int64_t> available_memory(const MemoryFiles& files) {
    return least(kilobytes(files.machine, "MemAvailable:"), group_left(files));
}

std::optional<std::int64_t> group_left(const MemoryFiles& files) {
    std::optional<std::int64_t> left;
    std::ifstream own(files.own);
    std::string number, kinds, name;
    while (std::getline(own, number, ':') && std::getline(own, kinds, ':') && std::getline(own, name)) {
        if (!kinds.empty() && !has_word(kinds, "memory")) continue;
        const std::filesystem::path root = kinds.empty() ? files.groups : files.groups / "memory";
        name.erase(0, name.find_first_not_of('/'));
        // A limit of any group above holds, too. In a container the name may be one of the machine's.
        for (std::filesystem::path place = name.empty() ? root : root / name;; place = place.parent_path()) {
            left = least(left, left_of(place, kinds.empty() ? version_2 : version_1, files));
            if (place == root || place == place.parent_path()) break;
        }
    }
    return left;
}

unsigned num_cores() { return std::max(1U, std::thread::hardware_concurrency()); }

std::string processor() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0 && line.find(':') != std::string::npos) return line.substr(line.find(':') + 1);
    return "";
}

bool is_busy() {
    double load = 0.0;
    return getloadavg(&load, 1) == 1 && load > static_cast<double>(num_cores());
}

} // namespace mars
