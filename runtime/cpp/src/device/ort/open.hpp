// runtime/device/ort/library.py: opens graphs in ONNX Runtime: execution providers and their options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include <mars/config.hpp>

#include "device/ort/api.hpp"

namespace mars {

constexpr const char* cpu_provider = "CPUExecutionProvider";
constexpr const char* cuda_provider = "CUDAExecutionProvider";

using OrtOptions = std::map<std::string, std::string>;

/// How a graph is run. `threads`: compute threads; no value: ONNX Runtime decides. `on_log` receives ONNX Runtime's
/// warnings and errors of this graph, from any thread. `cuda_stream`: a cudaStream_t.
struct OrtSettings {
    std::optional<int> threads = {};
    OrtOptions options = {};
    OnLog on_log = nullptr;
    void* cuda_stream = nullptr;
};

/// Session configuration entries, whose names have a dot, and options of the execution provider, whose names have none.
struct OrtParts {
    OrtOptions entries, of_provider;
    bool has_own_operators = false; // those of mars-export-kernels, which are a part of libmars
};

/// Split options by their names. `number`: the device's, which providers call device_id. Throws SessionError for
/// provider options on the CPU, for the accuracy level (the variant has its own), for CUDA graphs, and for a device_id
/// that contradicts the device.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

/// The execution provider of a device kind (DeviceName). Throws SessionError that lists the existing ones.
std::string provider_of(const std::string& device);

/// A provider's options: the caller's, with defaults for CUDA (fp32 without TF32, GPU memory allocated as needed).
OrtOptions provider_options(const std::string& provider, OrtOptions own);

/// Throws SessionError if this version's CUDA provider lacks kernels for the step graph's opset 24: hidden states would
/// be copied to the CPU in every layer.
void check_cuda_version(const std::string& version);

/// The instruction set of w8a8 graphs on a CPU. Throws SessionError if this processor lacks the one that MARS_EXPORT_KERNELS names.
std::string kernel_instructions();

/// Load a graph. Throws Ort::Exception.
void open_graph(OrtGraph& graph, const std::filesystem::path& file, const std::string& provider, const OrtParts& options,
                const OrtSettings& settings, std::int64_t accuracy_level);

} // namespace mars
