#include "machine.hpp"

#include <algorithm>
#include <cmath>
#include <dlfcn.h>
#include <fstream>
#include <link.h>
#include <sched.h>
#include <set>
#include <sstream>
#include <sys/utsname.h>
#include <thread>
#include <unistd.h>

#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

namespace {

/// The number in a file; no value for "max".
std::optional<std::int64_t> number_in(const std::filesystem::path& path) {
    std::int64_t value = 0;
    return std::ifstream(path) >> value ? std::optional(value) : std::nullopt;
}

/// The bytes of a line such as `MemAvailable:  123 kB`.
std::optional<std::int64_t> kilobytes(const std::filesystem::path& path, const std::string& name) {
    std::ifstream file(path);
    std::int64_t value = 0;
    for (std::string line; std::getline(file, line);)
        if (begins_with(line, name) && std::istringstream(line.substr(name.size())) >> value) return value * 1024;
    return std::nullopt;
}

/// Bytes of cached files in a control group's memory.
std::int64_t cached(const std::filesystem::path& group) {
    std::ifstream file(group / "memory.stat");
    std::int64_t sum = 0, value = 0;
    for (std::string name; file >> name >> value;)
        if (name == "active_file" || name == "inactive_file") sum += value;
    return sum;
}

/// The directory of the file with this code. Libraries that are opened from it are never looked for in the working directory, to which
/// the loader's own names can be relative.
std::filesystem::path find_own_directory() {
    Dl_info info{};
    void* loaded = nullptr;
    std::error_code error;
    if (dladdr1(reinterpret_cast<const void*>(&own_directory), &info, &loaded, RTLD_DL_LINKMAP) == 0) return {};
    const char* const name = static_cast<const link_map*>(loaded)->l_name;
    return std::filesystem::canonical(*name != '\0' ? name : "/proc/self/exe", error).parent_path(); // no name: the program itself
}

const std::filesystem::path directory_at_load = find_own_directory();

std::optional<std::int64_t> least(std::optional<std::int64_t> one, std::optional<std::int64_t> other) {
    return one && other ? std::min(*one, *other) : one ? one : other;
}

/// Bytes that one group may still use.
std::optional<std::int64_t> left_of(const std::filesystem::path& group, const MachineFiles& files) {
    const auto most = number_in(group / "memory.max"), used = number_in(group / "memory.current");
    if (!most || !used) return std::nullopt;
    const std::int64_t swap = kilobytes(files.memory, "SwapFree:").value_or(0);
    return *most - *used + cached(group) + least(swap, number_in(group / "memory.swap.max")).value_or(0);
}

/// Call `visit(directory)` for the control group (version 2) of this process, and for its parents, whose limits apply
/// too.
template <class Visit>
void each_group(const MachineFiles& files, Visit visit) {
    std::ifstream own(files.own);
    for (std::string line; std::getline(own, line);) {
        if (!begins_with(line, "0::")) continue;
        const std::string name = line.substr(std::min(line.size(), line.find_first_not_of('/', 3)));
        // In a container the name may be one that exists only on the host.
        for (std::filesystem::path group = name.empty() ? files.groups : files.groups / name;; group = group.parent_path()) {
            visit(group);
            if (group == files.groups || group == group.parent_path()) break;
        }
    }
}

} // namespace

std::optional<std::int64_t> available_memory(const MachineFiles& files) {
    return least(kilobytes(files.memory, "MemAvailable:"), group_left(files));
}

std::optional<std::int64_t> group_left(const MachineFiles& files) {
    std::optional<std::int64_t> left;
    each_group(files, [&](const std::filesystem::path& group) { left = least(left, left_of(group, files)); });
    return left;
}

int num_cores(const MachineFiles& files) {
    cpu_set_t mask;
    const bool has_mask = sched_getaffinity(0, sizeof mask, &mask) == 0;
    double cores = has_mask ? CPU_COUNT(&mask) : static_cast<double>(std::thread::hardware_concurrency());
    each_group(files, [&](const std::filesystem::path& group) {
        std::int64_t quota = 0, period = 0;
        std::ifstream(group / "cpu.max") >> quota >> period; // "max 100000" if there is no limit
        if (quota > 0 && period > 0) cores = std::min(cores, std::ceil(static_cast<double>(quota) / static_cast<double>(period)));
    });
    return std::max(1, static_cast<int>(cores));
}

std::optional<int> default_threads() {
    const int cores = num_cores();
    return cores < static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) ? std::optional(cores) : std::nullopt;
}

std::string processor(const MachineFiles& files) {
    std::ifstream file(files.processor);
    std::set<std::string> parts;
    std::string maker;
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(": ");
        const std::string value = colon == std::string::npos ? "" : line.substr(colon + 2);
        if (begins_with(line, "model name")) return value;
        if (begins_with(line, "CPU implementer")) maker = value;
        if (begins_with(line, "CPU part")) parts.insert("Arm " + maker + "/" + value);
    }
    std::string board;
    std::ifstream board_file(files.board);
    std::getline(board_file, board, '\0');
    return board + (board.empty() || parts.empty() ? "" : ", ") + joined(parts);
}

std::string this_platform() {
    utsname names{};
    uname(&names);
    return lower(std::string(names.sysname) + "-" + names.machine);
}

std::filesystem::path own_directory() {
    // Found while the library is loaded, because its name may be relative to the working directory of that time.
    if (directory_at_load.empty()) throw SessionError("the directory of libmars is unknown: its file was moved or removed");
    return directory_at_load;
}

} // namespace mars
