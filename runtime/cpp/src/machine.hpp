// The machine: its memory and its load. Twin of runtime/machine.py; knows Linux, elsewhere it says less.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace mars {

/// Where Linux says what memory there is: the tree of control groups, the names of this process's own, the machine's figures.
struct MemoryFiles {
    std::filesystem::path groups = "/sys/fs/cgroup", own = "/proc/self/cgroup", machine = "/proc/meminfo";
};

/// Bytes that this process may still take: free memory, or its control group's limit. Nothing where unknown.
std::optional<std::int64_t> available_memory(const MemoryFiles& files = {});

/// Bytes that the control groups of this process leave it, swap included; nothing without a limit.
///
/// What they hold of files counts as free: it goes when others need the room.
std::optional<std::int64_t> group_left(const MemoryFiles& files = {});

/// Logical cores of the machine; 1 where unknown.
unsigned num_cores();

/// The processor's name; "" where unknown.
std::string processor();

/// Whether more programs than cores ran in the last minute: what is measured now is not worth keeping.
bool is_busy();

} // namespace mars
