#include "device/name.hpp"

#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

DeviceName DeviceName::of(const std::string& text) {
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

} // namespace mars
