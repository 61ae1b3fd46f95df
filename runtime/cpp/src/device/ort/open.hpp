// runtime/device/ort/library.py: opens graphs in ONNX Runtime: execution providers and their options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <mars/config.hpp>
#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/lost.hpp"
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
/// provider options on the CPU, for the accuracy level (the variant has its own), and for a device_id that contradicts the
/// device.
OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number = std::nullopt);

/// The execution provider of a device kind (DeviceName). Throws SessionError that lists the existing ones.
std::string provider_of(const std::string& device);

/// The CUDA provider's options: the caller's, with defaults. `is_captured`: steps are captured as CUDA graphs.
OrtOptions cuda_options(OrtOptions own, bool is_captured);

/// Load the CUDA provider and the libraries that it needs. Throws Ort::Exception, also for unknown options.
void load_cuda(const OrtOptions& options);

/// Whether a version is 1.`least` or newer.
bool is_at_least(const std::string& version, int least);

/// Throws SessionError if this version's CUDA provider lacks kernels for the step graph's opset 24: hidden states would
/// be copied to the CPU in every layer.
void check_cuda_version(const std::string& version);

/// Throws SessionError if this version has no operators for recurrent layers.
void check_recurrent(const std::string& version);

/// The instruction set of w8a8 and w4a8 graphs on a CPU. Throws SessionError if this processor lacks the one that MARS_EXPORT_KERNELS names.
std::string kernel_instructions();

/// Load a graph. Throws Ort::Exception.
void open_graph(OrtGraph& graph, const std::filesystem::path& file, const std::string& provider, const OrtParts& options,
                const OrtSettings& settings, const Variant& variant);

/// A layer's keys or values: [rows, heads, capacity, width], or [rows, capacity, width] if `is_flat`. `item`: bytes of a number.
/// Throws SessionError for variants that ONNX Runtime does not run.
struct KvTensor {
    KvTensor(const ModelInfo& model, const Variant& variant);
    std::vector<std::int64_t> shape(std::int64_t rows, std::int64_t capacity) const;

    std::int64_t heads, width, item = 4;
    bool is_flat;
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};

/// The number of values of each output for one prediction. Throws BundleError if graph and manifest disagree about names and
/// sizes.
std::map<std::string, std::int64_t> check_signature(const Ort::Session& session, const std::filesystem::path& file, const Variant& variant,
                                                    const ModelInfo& model);

/// Throw `error` as DeviceLost, MemoryError or else as `Other`. `what` failed; `advice` is for a lack of memory.
template <typename Other>
[[noreturn]] void rethrow(const Ort::Exception& error, const std::string& what, const char* advice) {
    const std::string words = what + ": " + first_line(error);
    if (is_lasting(error.what())) throw DeviceLost(words + lost_advice);
    if (is_shortage(error)) throw MemoryError(words + advice);
    throw Other(words);
}

constexpr const char* open_advice = "; not enough memory: use a model of fewer or smaller weights, or free memory";
constexpr const char* step_advice = "; not enough memory: run fewer rows at once, shorten the prompt, or free memory";

/// What failed, of a step.
inline std::string failed_step(const StepInput& input) {
    return "ONNX Runtime failed in a step of " + std::to_string(input.rows) + " x " + std::to_string(input.slots) + " slots";
}

} // namespace mars
