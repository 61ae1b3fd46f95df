#include "device/ort/open.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <mars/errors.hpp>

#include "device/ort/backend.hpp"
#include "joined.hpp"
#include "log.hpp"
#include "machine.hpp"
#include "src/operators.hpp" // of mars-export-kernels

namespace mars {

namespace {

// ONNX Runtime 1.31 starts threads that report usage to its developers, on Linux too, unless this variable is set. A value
// that the user set is kept.
void disable_telemetry() {
    static const int once = ::setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    static_cast<void>(once);
}

constexpr int least_cuda_minor = 27;      // of ONNX Runtime 1
constexpr int least_recurrent_minor = 32; // whose operators for recurrent layers were tested
constexpr std::int64_t fastest_level = 4; // of products with int4 and int8 weights: activations in 8-bit blocks
constexpr const char* kernels_variable = "MARS_EXPORT_KERNELS";
constexpr const char* accuracy_entry = "session.qdq_matmulnbits_accuracy_level"; // profiles are checked against it

/// `user` is the session's OnLog.
void ORT_API_CALL pass_message(void* user, OrtLoggingLevel severity, const char*, const char*, const char*, const char* message) {
    const LogLevel level = severity >= ORT_LOGGING_LEVEL_ERROR     ? LogLevel::error
                           : severity == ORT_LOGGING_LEVEL_WARNING ? LogLevel::warning
                           : severity == ORT_LOGGING_LEVEL_INFO    ? LogLevel::info
                                                                   : LogLevel::debug;
    note(*static_cast<const OnLog*>(user), level, message == nullptr ? "" : message);
}

using CudaOptions = std::unique_ptr<OrtCUDAProviderOptionsV2, void (*)(OrtCUDAProviderOptionsV2*)>;

/// Setting options loads the provider. Throws Ort::Exception.
CudaOptions made(const OrtOptions& all) {
    const OrtApi& api = Ort::GetApi();
    std::vector<const char*> names, values;
    for (const auto& [name, value] : all) {
        names.push_back(name.c_str());
        values.push_back(value.c_str());
    }
    OrtCUDAProviderOptionsV2* settings = nullptr;
    Ort::ThrowOnError(api.CreateCUDAProviderOptions(&settings));
    CudaOptions owner(settings, api.ReleaseCUDAProviderOptions);
    Ort::ThrowOnError(api.UpdateCUDAProviderOptions(settings, names.data(), values.data(), names.size()));
    return owner;
}

/// Add a provider to the options. Throws Ort::Exception.
void add_provider(Ort::SessionOptions& options, const std::string& provider, const OrtOptions& all, void* cuda_stream) {
    if (provider == cuda_provider) {
        const CudaOptions settings = made(all);
        Ort::ThrowOnError(Ort::GetApi().UpdateCUDAProviderOptionsWithValue(settings.get(), "user_compute_stream", cuda_stream));
        options.AppendExecutionProvider_CUDA_V2(*settings);
    } else if (provider != cpu_provider) {
        options.AppendExecutionProvider(provider.substr(0, provider.rfind("ExecutionProvider")), {all.begin(), all.end()});
    }
}

} // namespace

OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number) {
    OrtParts parts;
    std::string odd;
    for (const auto& [name, value] : options) {
        if (name == accuracy_entry) throw SessionError(name + " cannot be set: the variant determines it");
        const bool is_entry = name.find('.') != std::string::npos;
        (is_entry ? parts.entries : parts.of_provider)[name] = value;
        if (!is_entry) odd += (odd.empty() ? "" : ", ") + name;
    }
    if (on_cpu && !odd.empty())
        throw SessionError("the CPU has no option " + odd +
                           "; names of ONNX Runtime's own have a dot, such as session.intra_op.allow_spinning");
    if (!number) return parts;
    const std::string& said = parts.of_provider.emplace("device_id", std::to_string(*number)).first->second;
    if (said != std::to_string(*number))
        throw SessionError("the device has number " + std::to_string(*number) + " and device_id is " + said.substr(0, 60) +
                           "; say it once, in the device");
    return parts;
}

std::string provider_of(const std::string& device) {
    const std::vector<std::string> providers = OrtBackend::devices();
    for (const std::string& provider : providers)
        if (lower(provider) == device + "executionprovider") return provider;
    throw SessionError("this ONNX Runtime " + OrtBackend::version() + " has no device `" + device.substr(0, 60) +
                       "` (it has: " + joined(providers) + "); use one of these, or an ONNX Runtime built with the one you want");
}

OrtOptions cuda_options(OrtOptions own, bool is_captured) {
    // GPU memory is allocated as needed, not in powers of two, so that more is left for KV rows. TF32, the default, computes float32
    // products with fewer bits than the CPU. Norms of sums add squares up in float32, not in half precision.
    own.insert({{"arena_extend_strategy", "kSameAsRequested"},
                {"use_tf32", "0"},
                {"enable_skip_layer_norm_strict_mode", "1"},
                {"enable_cuda_graph", is_captured ? "1" : "0"}});
    return own;
}

void load_cuda(const OrtOptions& options) { made(options); }

bool is_at_least(const std::string& version, int least) {
    int major = 0, minor = 0;
    return std::sscanf(version.c_str(), "%d.%d", &major, &minor) == 2 && (major > 1 || (major == 1 && minor >= least));
}

void check_cuda_version(const std::string& version) {
    if (is_at_least(version, least_cuda_minor)) return;
    throw SessionError("ONNX Runtime " + version + " leaves operators of every layer to the CPU (opset 24); install onnxruntime-gpu 1." +
                       std::to_string(least_cuda_minor) + " or newer");
}

void check_recurrent(const std::string& version) {
    if (!is_at_least(version, least_recurrent_minor))
        throw SessionError("recurrent layers need onnxruntime 1." + std::to_string(least_recurrent_minor) + " or newer, " + version +
                           " is installed");
}

bool is_shortage(const std::exception& error) {
    const std::string words = lower(error.what());
    const auto& known = {"bad_alloc", "failed to allocate", "cannot allocate memory", "allocaterawinternal", "out of memory"};
    return std::any_of(known.begin(), known.end(), [&](const char* each) { return words.find(each) != std::string::npos; });
}

std::string kernel_instructions() {
    const char* const wanted = std::getenv(kernels_variable);
    const std::string name = kernels::instructions();
    if (wanted != nullptr && *wanted != '\0' && wanted != std::string("0") && wanted != name) // 0 is for Python
        throw SessionError(std::string(kernels_variable) + "=" + std::string(wanted).substr(0, 60) +
                           " is not an instruction set of this processor, whose fastest is " + name + "; unset it");
    return name;
}

void open_graph(OrtGraph& graph, const std::filesystem::path& file, const std::string& provider, const OrtParts& options,
                const OrtSettings& settings, const Variant& variant) {
    disable_telemetry();
    graph.on_log = settings.on_log;
    graph.env = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "mars"); // the process has one: that of the host program, if it was first
    Ort::SessionOptions all;
    all.SetLogSeverityLevel(graph.on_log ? ORT_LOGGING_LEVEL_WARNING : ORT_LOGGING_LEVEL_FATAL);
    if (graph.on_log) Ort::ThrowOnError(Ort::GetApi().SetUserLoggingFunction(all, pass_message, &graph.on_log));
    if (const std::optional<int> threads = settings.threads ? settings.threads : default_threads()) all.SetIntraOpNumThreads(*threads);
    all.AddConfigEntry(accuracy_entry, std::to_string(variant.accuracy_level.value_or(fastest_level)).c_str());
    for (const auto& [name, value] : options.entries) all.AddConfigEntry(name.c_str(), value.c_str());
    if (options.has_own_operators) kernels::add_operators(all);
    add_provider(all, provider, options.of_provider, settings.cuda_stream);
    graph.session = Ort::Session(graph.env, file.c_str(), all);
}

} // namespace mars
