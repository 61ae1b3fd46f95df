// What a session is opened on, by its name: `cpu`, `cuda`, or a GPU by its number, `cuda:1`. Twin of runtime/device/name.py; asks no machine.
#pragma once

#include <optional>
#include <string>

namespace mars {

/// `kind`: an execution provider's name in lower case, without "ExecutionProvider". `number`: what was said behind the colon.
struct DeviceName {
    std::string kind;
    std::optional<int> number;

    /// Reads a name. Throws SessionError for a number that is none, and for one of the CPU.
    static DeviceName of(const std::string& text);

    /// The number, 0 where none was said.
    int ordinal() const { return number.value_or(0); }

    /// `cuda`, and `cuda:1` for another than the first.
    std::string text() const { return ordinal() == 0 ? kind : kind + ":" + std::to_string(ordinal()); }
};

} // namespace mars
