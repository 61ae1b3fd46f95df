// The machine: its memory and its load. Twin of runtime/machine.py; knows Linux, elsewhere it says less.
#pragma once

#include <cstdint>
#include <optional>

namespace mars {

/// Bytes that this process may still take: free memory, or its control group's limit. Nothing where unknown.
std::optional<std::int64_t> available_memory();

/// Whether more programs than cores ran in the last minute: what is measured now is not worth keeping.
bool is_busy();

} // namespace mars
