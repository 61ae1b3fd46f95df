#include "device/ort/open.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <mutex>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <mars/errors.hpp>

#include "device/ort/backend.hpp"
#include "joined.hpp"
#include "log.hpp"
#include "machine.hpp"

namespace mars {

namespace {

// ONNX Runtime 1.31 starts threads that report usage to its developers, on Linux too, unless this variable is set. A value
// that the user set is kept.
void disable_telemetry() {
    static const int once = ::setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    static_cast<void>(once);
}

constexpr int least_cuda_minor = 27; // of ONNX Runtime 1

// Operators outside layers that work on shapes, positions and masks only, as in runtime/device/ort/backend.py. All
// others have hidden states or logits.
constexpr std::string_view small[] = {"Shape", "Squeeze",     "Unsqueeze", "Range", "Concat", "Cast", "Add",
                                      "Sub",   "LessOrEqual", "Greater",   "And",   "Cos",    "Sin",  "Mul"};
constexpr std::string_view large_names[] = {"allowed", "shifted", "weighted"}; // masks as large as logits

void ORT_API_CALL drop_message(void*, OrtLoggingLevel, const char*, const char*, const char*, const char*) {}

/// `user` is the session's OnLog.
void ORT_API_CALL pass_message(void* user, OrtLoggingLevel severity, const char*, const char*, const char*, const char* message) {
    const LogLevel level = severity >= ORT_LOGGING_LEVEL_ERROR     ? LogLevel::error
                           : severity == ORT_LOGGING_LEVEL_WARNING ? LogLevel::warning
                           : severity == ORT_LOGGING_LEVEL_INFO    ? LogLevel::info
                                                                   : LogLevel::debug;
    note(*static_cast<const OnLog*>(user), level, message == nullptr ? "" : message);
}

/// The CUDA plugin's library beside ONNX Runtime's own; empty if there is none.
std::filesystem::path cuda_plugin_library() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&ort_base()), &info) == 0 || info.dli_fname == nullptr) return {};
    const auto path = std::filesystem::path(info.dli_fname).parent_path() / "libonnxruntime_providers_cuda_plugin.so";
    std::error_code error;
    return std::filesystem::exists(path, error) ? path : std::filesystem::path();
}

/// Register CUDA's provider plugin and choose the device.
void add_plugin([[maybe_unused]] Ort::Env& env, [[maybe_unused]] Ort::SessionOptions& options, [[maybe_unused]] const OrtOptions& own) {
#if ORT_API_VERSION >= 23
    static std::once_flag once;
    std::call_once(once, [&] { env.RegisterExecutionProviderLibrary(cuda_plugin, cuda_plugin_library().string()); });
    const auto number = own.find("device_id");
    std::size_t left = number == own.end() ? 0 : std::stoul(number->second);
    for (const Ort::ConstEpDevice& device : env.GetEpDevices()) {
        if (std::string_view(device.EpName()) != cuda_plugin || left-- > 0) continue;
        std::unordered_map<std::string, std::string> rest(own.begin(), own.end());
        rest.erase("device_id");
        options.AppendExecutionProvider_V2(env, {device}, rest);
        return;
    }
    throw SessionError(std::string(cuda_plugin) + " has no such GPU (check nvidia-smi and CUDA_VISIBLE_DEVICES)");
#else
    throw SessionError(std::string(cuda_plugin) +
                       " needs a libmars that was built with headers of ONNX Runtime 1.23 or newer (docs/cpp.md)");
#endif
}

/// Add the request's provider to the options. Throws Ort::Exception.
void add_provider(Ort::Env& env, Ort::SessionOptions& options, const OrtRequest& request) {
    const OrtApi& api = Ort::GetApi();
    const std::string& provider = request.provider;
    const OrtOptions all = provider_options(provider, request.options.of_provider);
    std::vector<const char*> names, values;
    for (const auto& [name, value] : all) {
        names.push_back(name.c_str());
        values.push_back(value.c_str());
    }
    if (provider == cuda_provider) {
        OrtCUDAProviderOptionsV2* settings = nullptr;
        Ort::ThrowOnError(api.CreateCUDAProviderOptions(&settings));
        const std::unique_ptr<OrtCUDAProviderOptionsV2, decltype(api.ReleaseCUDAProviderOptions)> owner(settings,
                                                                                                        api.ReleaseCUDAProviderOptions);
        Ort::ThrowOnError(api.UpdateCUDAProviderOptions(settings, names.data(), values.data(), names.size()));
        if (request.cuda_stream != nullptr)
            Ort::ThrowOnError(api.UpdateCUDAProviderOptionsWithValue(settings, "user_compute_stream", request.cuda_stream));
        options.AppendExecutionProvider_CUDA_V2(*settings);
    } else if (provider == cuda_plugin) {
        if (request.cuda_stream != nullptr) throw SessionError(std::string(cuda_plugin) + " does not support cuda_stream");
        add_plugin(env, options, all);
    } else if (provider == "TensorrtExecutionProvider") {
        OrtTensorRTProviderOptionsV2* settings = nullptr;
        Ort::ThrowOnError(api.CreateTensorRTProviderOptions(&settings));
        const std::unique_ptr<OrtTensorRTProviderOptionsV2, decltype(api.ReleaseTensorRTProviderOptions)> owner(
            settings, api.ReleaseTensorRTProviderOptions);
        if (!names.empty()) Ort::ThrowOnError(api.UpdateTensorRTProviderOptions(settings, names.data(), values.data(), names.size()));
        options.AppendExecutionProvider_TensorRT_V2(*settings);
    } else if (provider != cpu_provider) {
        options.AppendExecutionProvider(provider.substr(0, provider.rfind("ExecutionProvider")), {all.begin(), all.end()});
    }
}

} // namespace

std::string provider_of(const std::string& device) {
    const std::vector<std::string> providers = OrtBackend::devices();
    for (const std::string& provider : providers)
        if (lower(provider) == device + "executionprovider") return provider;
    if (device == "cuda" && !cuda_plugin_library().empty()) return cuda_plugin;
    throw SessionError("this ONNX Runtime " + OrtBackend::version() + " has no device `" + device.substr(0, 60) +
                       "` (it has: " + joined(providers) + "); use one of these, or an ONNX Runtime built with the one you want");
}

OrtOptions provider_options(const std::string& provider, OrtOptions own) {
    // Allocate GPU memory as needed, not in powers of two, so that more is left for KV rows.
    if (provider == cuda_provider) own.emplace("arena_extend_strategy", "kSameAsRequested");
    // TF32, the default, computes float32 products with fewer bits; confidences would differ from other devices.
    if (provider == cuda_provider || provider == cuda_plugin) own.emplace("use_tf32", "0");
    return own;
}

void check_cuda_version(const std::string& version) {
    int major = 0, minor = 0;
    if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) == 2 && (major > 1 || (major == 1 && minor >= least_cuda_minor))) return;
    throw SessionError("ONNX Runtime " + version + " leaves operators of every layer to the CPU (opset 24); install onnxruntime-gpu 1." +
                       std::to_string(least_cuda_minor) + " or newer");
}

bool is_shortage(const std::exception& error) {
    const std::string words = lower(error.what());
    const auto& known = {"bad_alloc", "failed to allocate", "cannot allocate memory", "allocaterawinternal", "out of memory"};
    return std::any_of(known.begin(), known.end(), [&](const char* each) { return words.find(each) != std::string::npos; });
}

std::shared_ptr<OrtGraph> open_graph(const OrtRequest& request) {
    disable_telemetry();
    auto graph = std::make_shared<OrtGraph>();
    graph->on_log = request.on_log;
    graph->env = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "mars", drop_message, nullptr);
    Ort::SessionOptions settings;
    settings.SetLogSeverityLevel(graph->on_log ? ORT_LOGGING_LEVEL_WARNING : ORT_LOGGING_LEVEL_FATAL);
    if (graph->on_log) Ort::ThrowOnError(Ort::GetApi().SetUserLoggingFunction(settings, pass_message, &graph->on_log));
    if (const std::optional<int> threads = request.threads ? request.threads : default_threads()) settings.SetIntraOpNumThreads(*threads);
    settings.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", std::to_string(request.accuracy_level).c_str());
    if (request.provider != cpu_provider) settings.AddConfigEntry("session.record_ep_graph_assignment_info", "1");
    for (const auto& [name, value] : request.options.entries) settings.AddConfigEntry(name.c_str(), value.c_str());
    add_provider(graph->env, settings, request);
    graph->session = Ort::Session(graph->env, request.file.c_str(), settings);
    return graph;
}

bool is_large(const std::string& operator_type, const std::string& name) {
    if (name.rfind("layers.", 0) == 0) return operator_type != "Shape" && operator_type != "Constant";
    const auto has = [](const auto& names, const std::string& one) {
        return std::find(std::begin(names), std::end(names), one) != std::end(names);
    };
    return !has(small, operator_type) || has(large_names, name);
}

std::optional<std::map<std::string, int>> large_on_cpu([[maybe_unused]] const OrtGraph& graph,
                                                       [[maybe_unused]] const std::string& provider) {
#if ORT_API_VERSION >= 24
    std::map<std::string, int> counts;
    for (const Ort::ConstEpAssignedSubgraph& part : graph.session.GetEpGraphAssignmentInfo()) {
        if (part.GetEpName() == provider) continue;
        for (const Ort::ConstEpAssignedNode& node : part.GetNodes())
            if (is_large(node.GetOperatorType(), node.GetName())) ++counts[node.GetOperatorType()];
    }
    return counts;
#else
    return std::nullopt;
#endif
}

std::string words_on_cpu(const std::map<std::string, int>& large, const std::string& provider) {
    const auto text_of = [](const auto& operators) { return std::to_string(operators.second) + " " + operators.first; };
    const auto add = [](int sum, const auto& operators) { return sum + operators.second; };
    const int total = std::accumulate(large.begin(), large.end(), 0, add);
    return provider + " leaves " + std::to_string(total) + " operators on hidden states to the CPU (" + joined(large, ", ", text_of) +
           "): up to " + std::to_string(2 * total) +
           " copies between CPU and GPU in every step; install onnxruntime-gpu 1.27 or newer, or build a TensorRT engine (mars-export trt)";
}

} // namespace mars
