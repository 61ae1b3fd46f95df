// The machine: its memory and its load. Twin of runtime/machine.py; knows Linux, elsewhere it says less.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mars {

/// Where Linux describes the machine: the tree of control groups, the names of this process's own, memory, processor, board and GPUs.
struct MachineFiles {
    std::filesystem::path groups = "/sys/fs/cgroup", own = "/proc/self/cgroup", memory = "/proc/meminfo", processor = "/proc/cpuinfo",
                          board = "/proc/device-tree/model", gpus = "/proc/driver/nvidia/gpus";
};

/// Bytes that this process may still take: free memory, or its control group's limit. Nothing where unknown.
std::optional<std::int64_t> available_memory(const MachineFiles& files = {});

/// Bytes that the control groups of this process leave it, swap included; nothing without a limit.
///
/// What they hold of files counts as free: it goes when others need the room.
std::optional<std::int64_t> group_left(const MachineFiles& files = {});

/// Logical cores that this process may keep busy: those of its affinity mask, or as many as its control group's limit of processor time
/// is worth, rounded up; at least 1.
int num_cores(const MachineFiles& files = {});

/// Threads of a session where none are asked for: nothing, the library's own choice, unless this process may use a part of the machine only.
std::optional<int> default_threads();

/// The processor's name. Arm has none in /proc/cpuinfo: its board, and the makers' and parts' numbers of its cores. "" where unknown.
std::string processor(const MachineFiles& files = {});

/// Names of this machine's NVIDIA GPUs; none where the driver has no list of them, as on Jetson.
std::vector<std::string> gpus(const MachineFiles& files = {});

/// Whether more programs than cores ran in the last minute: what is measured now is not worth keeping.
bool is_busy();

} // namespace mars
