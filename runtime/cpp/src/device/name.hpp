// runtime/device/name.py: device names: `cpu`, `cuda`, or a GPU by its number, `cuda:1`.
#pragma once

#include <optional>
#include <string>

namespace mars {

/// `kind`: an execution provider's name in lower case, without "ExecutionProvider". `number`: the number after the
/// colon.
struct DeviceName {
    std::string kind;
    std::optional<int> number;

    /// Parse a name. Throws SessionError for an invalid number, and for a number of the CPU.
    static DeviceName of(const std::string& text);

    /// The number, 0 by default.
    int ordinal() const { return number.value_or(0); }

    /// `cuda`, or `cuda:1` for any GPU but the first.
    std::string text() const { return ordinal() == 0 ? kind : kind + ":" + std::to_string(ordinal()); }
};

} // namespace mars
