// Deeply nested inputs: the bytes 1 and 2, which do not occur in JSON, become a thousand brackets each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

inline std::string deepened(const std::uint8_t* data, std::size_t size) {
    std::string text;
    int left = 400; // of them, so that an input stays below half a megabyte
    for (std::size_t i = 0; i < size; ++i) {
        const bool is_many = (data[i] == 1 || data[i] == 2) && left-- > 0;
        text.append(is_many ? 1000 : 1, !is_many ? static_cast<char>(data[i]) : data[i] == 1 ? '[' : ']');
    }
    return text;
}
