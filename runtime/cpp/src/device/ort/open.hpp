// Opens graphs in ONNX Runtime: execution providers, their options, and which operators a provider leaves to the CPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <mars/config.hpp>

#include "device/ort/api.hpp"
#include "device/ort/options.hpp"

namespace mars {

constexpr const char* cpu_provider = "CPUExecutionProvider";
constexpr const char* cuda_provider = "CUDAExecutionProvider";
constexpr const char* cuda_plugin = "CudaPluginExecutionProvider"; ///< the same as a plugin library (ONNX Runtime 1.26)

/// The execution provider of a device kind (DeviceName). Throws SessionError that lists the existing ones.
std::string provider_of(const std::string& device);

/// A provider's options: the caller's, with defaults for CUDA (fp32 without TF32, GPU memory allocated as needed).
OrtOptions provider_options(const std::string& provider, OrtOptions own);

/// Throws SessionError if this version's CUDA provider lacks kernels for the step graph's opset 24: hidden states would
/// be copied to the CPU in every layer.
void check_cuda_version(const std::string& version);

/// What to open, and how.
struct OrtRequest {
    std::filesystem::path file;
    std::string provider;
    OrtParts options;
    std::optional<int> threads;
    std::int64_t accuracy_level = 0;
    OnLog on_log = nullptr;
    void* cuda_stream = nullptr;
};

/// Throws Ort::Exception.
std::shared_ptr<OrtGraph> open_graph(const OrtRequest& request);

/// Whether a node of a step graph has hidden states or logits, not only shapes, positions and masks.
bool is_large(const std::string& operator_type, const std::string& name);

/// Number of large nodes that do not run on `provider`, by operator. No value if this library was built with headers
/// older than ONNX Runtime 1.24, which cannot report it.
std::optional<std::map<std::string, int>> large_on_cpu(const OrtGraph& graph, const std::string& provider);

/// The same as a sentence for the log.
std::string words_on_cpu(const std::map<std::string, int>& large, const std::string& provider);

} // namespace mars
