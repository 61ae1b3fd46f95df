// Where the KV rows of a session lie, by ONNX Runtime's names of memory. Includes none of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device/ort_options.hpp"

namespace mars {

/// Memory of a device. `rows`: its allocator's name, such as "Cuda"; `bound`: what tensors there are bound as, the same but for tests;
/// `host`: memory that the device copies from and to without a detour, such as "CudaPinned"; `index`: which device.
struct OrtPlace {
    std::string rows, bound, host;
    int index = 0;
};

/// Of a provider; nothing where KV rows are in the host's memory and, off the CPU, cross at each step.
std::optional<OrtPlace> place_of(const std::string& provider, const OrtOptions& of_provider);

/// Bytes that crossed between a session and its device since it was opened: inputs and entries that were brought, results.
struct OrtTraffic {
    std::uint64_t sent = 0, fetched = 0;
};

} // namespace mars
