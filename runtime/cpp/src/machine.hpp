// runtime/machine.py: memory, cores and processor of this machine. Complete on Linux only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace mars {

/// Where Linux describes the machine. `own` names this process's control groups. Tests replace these paths.
struct MachineFiles {
    std::filesystem::path groups = "/sys/fs/cgroup", own = "/proc/self/cgroup", memory = "/proc/meminfo", processor = "/proc/cpuinfo",
                          board = "/proc/device-tree/model";
};

/// Bytes that this process may still use: free memory, or what its control group allows. No value if unknown.
std::optional<std::int64_t> available_memory(const MachineFiles& files = {});

/// Bytes that the control groups allow this process, swap included; no value without a limit.
///
/// Cached files count as free, because the kernel drops them when memory is needed.
std::optional<std::int64_t> group_left(const MachineFiles& files = {});

/// Logical cores that this process may use: its affinity mask, bounded by its control group's CPU quota (rounded up).
/// At least 1.
int num_cores(const MachineFiles& files = {});

/// Default number of threads: no value (the library decides), unless this process may use only a part of the machine.
std::optional<int> default_threads();

/// The processor's name. Arm names none in /proc/cpuinfo, so this is the board and the numbers of the core types. "" if
/// unknown.
std::string processor(const MachineFiles& files = {});

/// Operating system and processor of this machine, such as `linux-x86_64`.
std::string this_platform();

/// The directory of the library or program that contains this code. Throws SessionError if it is unknown.
std::filesystem::path own_directory();

} // namespace mars
