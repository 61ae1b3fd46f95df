// What a caller may tell ONNX Runtime itself when a session is opened: pairs by its own names. Includes none of it.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace mars {

using OrtOptions = std::map<std::string, std::string>;

/// Entries of a session's configuration, whose names have a dot, and options of the execution provider, whose names have none.
struct OrtParts {
    OrtOptions entries, of_provider;
};

/// `number`: the device's, which providers call device_id. Throws SessionError for provider options on the CPU, which has none, for the
/// accuracy level, which is the variant's own, for a device_id beside another number, and for `enable_cuda_graph`, which needs steps that are
/// all alike or are numbered.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

} // namespace mars
