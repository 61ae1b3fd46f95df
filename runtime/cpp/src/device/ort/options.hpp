// What a caller may tell ONNX Runtime itself when a session is opened: pairs by its own names. Includes none of it.
#pragma once

#include <map>
#include <optional>
#include <string>

#include <mars/config.hpp>

namespace mars {

using OrtOptions = std::map<std::string, std::string>;

/// How a graph is run. `threads`: compute threads, nothing for ONNX Runtime's choice; `on_log` hears ONNX Runtime's warnings and errors of
/// this graph, from any thread; `strict`: operators on hidden states that are left to the CPU are an error; `cuda_stream`: a cudaStream_t.
struct OrtSettings {
    std::optional<int> threads = {};
    OrtOptions options = {};
    OnLog on_log = nullptr;
    bool strict = false;
    void* cuda_stream = nullptr;
};

/// Entries of a session's configuration, whose names have a dot, and options of the execution provider, whose names have none.
struct OrtParts {
    OrtOptions entries, of_provider;
};

/// `number`: the device's, which providers call device_id. Throws SessionError for provider options on the CPU, which has none, for the
/// accuracy level, which is the variant's own, for CUDA graphs, and for a device_id beside another number.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

} // namespace mars
