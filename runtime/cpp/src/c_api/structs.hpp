// Structs of the C interface, whose size may differ between the caller's header and this library.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include <mars/mars.h>

namespace mars::c {

/// The C interface was used wrongly.
struct ArgumentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename T>
T& needed(T* pointer, const char* name) {
    if (pointer == nullptr) throw ArgumentError(std::string(name) + " must not be NULL");
    return *pointer;
}

/// The size of the caller's struct.
template <typename T>
std::size_t size_of(const T* given, const char* name) {
    const std::size_t size = needed(given, name).struct_size;
    if (size < sizeof(std::size_t)) throw ArgumentError(std::string(name) + ": set struct_size to the size of the struct");
    return size;
}

/// Write `defaults` to the caller's struct as far as both reach; fields that this library does not know become 0.
template <typename T>
void init(T* target, std::size_t struct_size, const T& defaults) noexcept {
    if (target == nullptr || struct_size < sizeof(std::size_t)) return;
    std::memset(target, 0, struct_size);
    std::memcpy(target, &defaults, std::min(struct_size, sizeof(T)));
    target->struct_size = struct_size;
}

/// Write `values` to the caller's struct as far as both reach.
template <typename T>
void fill(T* target, const T& values, const char* name) {
    init(target, size_of(target, name), values);
}

/// The caller's struct as this library knows it. Fields missing in an older caller's get their defaults; fields that
/// only a newer caller knows must be zero.
template <typename T>
T known(const T* given, const T& defaults, const char* name) {
    if (given == nullptr) return defaults;
    const std::size_t size = size_of(given, name);
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw ArgumentError(std::string(name) + ": a setting that libmars " + mars_version() + " does not know; update libmars");
    T values = defaults;
    std::memcpy(&values, given, std::min(size, sizeof(T)));
    return values;
}

} // namespace mars::c
