// The names and sizes that a step graph must have by the manifest (runtime/device/ort/signature.py).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "device/ort/api.hpp"

namespace mars {

struct OrtSignature {
    std::vector<std::string> outputs, past_names, present_names;
    std::int64_t vocab_size = 0, kv_heads = 0, head_dim = 0;
    ONNXTensorElementDataType kv_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
};

/// Check a loaded graph. Returns the number of likeliest tokens that it gives for each prediction, or 0. Throws
/// BundleError if the graph is not as `wanted`; `file` is its name.
std::int64_t check_signature(const Ort::Session& session, const std::filesystem::path& file, const OrtSignature& wanted);

} // namespace mars
