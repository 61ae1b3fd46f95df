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
/// accuracy level, which is the variant's own, and for a device_id beside another number.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

constexpr const char* graph_option = "enable_cuda_graph";

/// Whether a provider's options ask for captured steps. Throws SessionError where they ask a provider whose steps are not numbered for them:
/// it would replay the first step for all others.
bool asks_for_graphs(const std::string& provider, const OrtOptions& of_provider);

/// The same options without the question.
OrtOptions without_graphs(OrtOptions of_provider);

} // namespace mars
