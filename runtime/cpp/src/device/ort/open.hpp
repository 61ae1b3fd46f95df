// A graph in ONNX Runtime: which provider computes it, with which options, and which of its operators the provider leaves to the CPU.
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
constexpr const char* cuda_plugin = "CudaPluginExecutionProvider"; ///< the same as a library that is registered (ONNX Runtime 1.26)

/// The provider of a kind of device, as DeviceName has it; throws SessionError that lists those there are.
std::string provider_of(const std::string& device);

/// A provider's options: the caller's, and where those say nothing fp32 without TF32, and memory of a GPU as it is needed.
OrtOptions provider_options(const std::string& provider, OrtOptions own);

/// Throws SessionError for an ONNX Runtime whose CUDA provider lacks kernels of a step graph's opset, 24: hidden states would cross to the
/// CPU in every layer.
void check_cuda_version(const std::string& version);

/// What is opened, and how.
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

/// Whether a node of a step graph has hidden states or logits, and not only shapes, positions and masks.
bool is_large(const std::string& operator_type, const std::string& name);

/// Operator -> how many large nodes of a graph run elsewhere than on `provider`. Nothing where this library was built with headers of ONNX
/// Runtime before 1.24, which has no such question.
std::optional<std::map<std::string, int>> large_on_cpu(const OrtGraph& graph, const std::string& provider);

/// What these mean, for the log.
std::string words_on_cpu(const std::map<std::string, int>& large, const std::string& provider);

} // namespace mars
