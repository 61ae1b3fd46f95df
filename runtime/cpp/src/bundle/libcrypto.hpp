// SHA-256 of the system's libcrypto, which uses what the processor has for it. Found when the library is wanted; nothing needs it.
#pragma once

#include <cstddef>

namespace mars {

/// The functions of libcrypto that a SHA-256 takes, by their names there.
struct Libcrypto {
    void* (*context_new)() = nullptr;
    void (*context_free)(void*) = nullptr;
    const void* (*sha256)() = nullptr;
    int (*init)(void*, const void*, void*) = nullptr;
    int (*update)(void*, const void*, std::size_t) = nullptr;
    int (*final)(void*, unsigned char*, unsigned*) = nullptr;

    /// libcrypto 3 or 1.1, or nullptr. Stays open until the process ends, as libcrypto wants it.
    static const Libcrypto* find();
};

} // namespace mars
