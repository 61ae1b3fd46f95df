// runtime/device/name.py: device names: `cpu`, `cuda`, or a GPU by its number, `cuda:1`.
#pragma once

#include <optional>
#include <string>

#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

/// `kind`: an execution provider's name in lower case, without "ExecutionProvider". `number`: the number after the
/// colon.
struct DeviceName {
    std::string kind;
    std::optional<int> number;

    /// Parse a name. Throws SessionError for an invalid number, and for a number of the CPU.
    static DeviceName of(const std::string& text) {
        const std::size_t colon = text.find(':');
        const std::string kind = lower(text.substr(0, colon));
        DeviceName name{kind.substr(0, kind.find("executionprovider")), std::nullopt};
        if (colon == std::string::npos) return name;
        const std::string number = text.substr(colon + 1);
        if (number.empty() || number.size() > 4 || number.find_first_not_of("0123456789") != std::string::npos)
            throw SessionError("device `" + text.substr(0, 60) +
                               "`: the part after the colon must be a GPU number, counted from 0, as in cuda:1");
        if (name.kind == "cpu") throw SessionError("device `" + text.substr(0, 60) + "`: the CPU has no number; give cpu");
        name.number = std::stoi(number);
        return name;
    }

    int ordinal() const { return number.value_or(0); }

    /// `cuda`, or `cuda:1` for any GPU but the first.
    std::string text() const { return ordinal() == 0 ? kind : kind + ":" + std::to_string(ordinal()); }
};

} // namespace mars
