// Options for ONNX Runtime itself, by its own names (runtime/device/ort/library.py).
#pragma once

#include <map>
#include <optional>
#include <string>

#include <mars/config.hpp>

namespace mars {

using OrtOptions = std::map<std::string, std::string>;

/// How a graph is run. `threads`: compute threads; no value: ONNX Runtime decides. `on_log` receives ONNX Runtime's
/// warnings and errors of this graph, from any thread. `strict`: operators on hidden states that are left to the CPU
/// are an error. `cuda_stream`: a cudaStream_t.
struct OrtSettings {
    std::optional<int> threads = {};
    OrtOptions options = {};
    OnLog on_log = nullptr;
    bool strict = false;
    void* cuda_stream = nullptr;
};

/// Session configuration entries, whose names have a dot, and options of the execution provider, whose names have none.
struct OrtParts {
    OrtOptions entries, of_provider;
};

/// Split options by their names. `number`: the device's, which providers call device_id. Throws SessionError for
/// provider options on the CPU, for the accuracy level (the variant has its own), for CUDA graphs, and for a device_id
/// that contradicts the device.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

} // namespace mars
