// What Linux says of itself in files.
#include "machine.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

namespace mars {

namespace {

std::optional<std::int64_t> number(const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end != text.data() ? std::optional(value) : std::nullopt;
}

std::optional<std::int64_t> number_in(const char* path) {
    std::ifstream file(path);
    std::string line;
    return std::getline(file, line) ? number(line) : std::nullopt;
}

std::optional<std::int64_t> free_memory() {
    std::ifstream file("/proc/meminfo");
    for (std::string name, value, unit; file >> name >> value && std::getline(file, unit);)
        if (name == "MemAvailable:") {
            const auto kilobytes = number(value);
            return kilobytes ? std::optional(*kilobytes * 1024) : std::nullopt;
        }
    return std::nullopt;
}

} // namespace

std::optional<std::int64_t> available_memory() {
    std::optional<std::int64_t> least = free_memory();
    const auto most = number_in("/sys/fs/cgroup/memory.max"), used = number_in("/sys/fs/cgroup/memory.current");
    if (most && used) least = least ? std::min(*least, *most - *used) : *most - *used;
    return least;
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
