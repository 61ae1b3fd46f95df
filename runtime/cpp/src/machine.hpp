// The machine: its memory and its load. Twin of runtime/machine.py; knows Linux, elsewhere it says less.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mars {

/// Bytes that this process may still take: free memory, or its control group's limit. Nothing where unknown.
std::optional<std::int64_t> available_memory();

/// Logical cores of the machine; 1 where unknown.
unsigned num_cores();

/// The processor's name; "" where unknown.
std::string processor();

/// Whether more programs than cores ran in the last minute: what is measured now is not worth keeping.
bool is_busy();

} // namespace mars
