// Providers and sessions.
#include "device/ort_open.hpp"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <mars/errors.hpp>

#include "device/ort.hpp"
#include "log.hpp"

namespace mars {

namespace {

// ONNX Runtime 1.31 tells its makers what it runs, on Linux too, by threads that its environment starts; it asks this variable first. Who
// set it, to whatever, decided.
void tell_nobody() {
    static const int once = ::setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    static_cast<void>(once);
}

constexpr int most_moves = 5;
std::atomic<bool> begun{false};

// What a step's time goes into; a few nodes on shapes are left to the CPU by ONNX Runtime's own choice.
constexpr const char* heavy[] = {"Attention",   "DequantizeLinear", "GatherBlockQuantized", "MatMul",       "MatMulInteger",
                                 "MatMulNBits", "RMSNormalization", "RotaryEmbedding",      "TensorScatter"};

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

/// A session. One that failed because the graph's directory got another name meanwhile is tried again: it is the same directory, and ONNX
/// Runtime compares names.
Ort::Session loaded(const Ort::Env& env, const std::filesystem::path& graph, const Ort::SessionOptions& options) {
    for (int left = most_moves; left > 0; --left) try {
            return Ort::Session(env, graph.c_str(), options);
        } catch (const Ort::Exception& error) {
            if (std::string_view(error.what()).find("escapes model directory") == std::string_view::npos) throw;
        }
    return Ort::Session(env, graph.c_str(), options);
}

void ORT_API_CALL drop_message(void*, OrtLoggingLevel, const char*, const char*, const char*, const char*) {}

/// `user` is the OnLog of a session that has one.
void ORT_API_CALL pass_message(void* user, OrtLoggingLevel severity, const char*, const char*, const char*, const char* message) {
    const LogLevel level = severity >= ORT_LOGGING_LEVEL_ERROR     ? LogLevel::error
                           : severity == ORT_LOGGING_LEVEL_WARNING ? LogLevel::warning
                           : severity == ORT_LOGGING_LEVEL_INFO    ? LogLevel::info
                                                                   : LogLevel::debug;
    note(*static_cast<const OnLog*>(user), level, message == nullptr ? "" : message);
}

} // namespace

void init_ort() {
    const OrtApi* api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (api == nullptr)
        throw SessionError("ONNX Runtime " + OrtBackend::version() + " is older than the headers this library was built with (1." +
                           std::to_string(ORT_API_VERSION) + "); install that version or a newer one");
    Ort::InitApi(api);
}

std::string provider_of(const std::string& device) {
    std::string known;
    for (const std::string& provider : OrtBackend::devices()) {
        if (lower(provider) == device + "executionprovider") return provider;
        known += (known.empty() ? "" : ", ") + provider;
    }
    throw SessionError("this ONNX Runtime " + OrtBackend::version() + " has no device `" + device.substr(0, 60) + "` (it has: " + known +
                       "); use one of these, or an ONNX Runtime built with the one you want");
}

void add_provider(Ort::SessionOptions& options, const std::string& provider, const OrtOptions& own) {
    const OrtApi& api = Ort::GetApi();
    OrtOptions all = own;
    // Memory of a GPU is asked for as it is needed, not in powers of two: what is left is for KV rows.
    if (provider == "CUDAExecutionProvider") all.emplace("arena_extend_strategy", "kSameAsRequested");
    std::vector<const char*> names, values;
    for (const auto& [name, value] : all) {
        names.push_back(name.c_str());
        values.push_back(value.c_str());
    }
    if (provider == "CUDAExecutionProvider") {
        OrtCUDAProviderOptionsV2* settings = nullptr;
        Ort::ThrowOnError(api.CreateCUDAProviderOptions(&settings));
        const std::unique_ptr<OrtCUDAProviderOptionsV2, decltype(api.ReleaseCUDAProviderOptions)> owner(settings,
                                                                                                        api.ReleaseCUDAProviderOptions);
        Ort::ThrowOnError(api.UpdateCUDAProviderOptions(settings, names.data(), values.data(), names.size()));
        options.AppendExecutionProvider_CUDA_V2(*settings);
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

bool has_begun() { return begun; }

bool is_shortage(const std::exception& error) {
    const std::string words = lower(error.what());
    const auto& known = {"bad_alloc", "failed to allocate", "cannot allocate memory", "allocaterawinternal", "out of memory"};
    return std::any_of(known.begin(), known.end(), [&](const char* each) { return words.find(each) != std::string::npos; });
}

std::shared_ptr<OrtGraph> open_graph(const OrtRequest& request) {
    tell_nobody();
    auto graph = std::make_shared<OrtGraph>();
    graph->on_log = request.on_log;
    graph->env = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "mars", drop_message, nullptr);
    begun = true;
    Ort::SessionOptions settings;
    settings.SetLogSeverityLevel(graph->on_log ? ORT_LOGGING_LEVEL_WARNING : ORT_LOGGING_LEVEL_FATAL);
    if (graph->on_log) Ort::ThrowOnError(Ort::GetApi().SetUserLoggingFunction(settings, pass_message, &graph->on_log));
    if (request.threads) settings.SetIntraOpNumThreads(*request.threads);
    settings.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", std::to_string(request.accuracy_level).c_str());
    if (request.provider != cpu_provider) settings.AddConfigEntry("session.record_ep_graph_assignment_info", "1");
    for (const auto& [name, value] : request.options.entries) settings.AddConfigEntry(name.c_str(), value.c_str());
    if (!request.arena) settings.DisableCpuMemArena();
    add_provider(settings, request.provider, request.options.of_provider);
    graph->session = loaded(graph->env, request.place, settings);
    return graph;
}

std::optional<std::map<std::string, int>> on_cpu([[maybe_unused]] const OrtGraph& graph, [[maybe_unused]] const std::string& provider) {
#if ORT_API_VERSION >= 24
    std::map<std::string, int> counts;
    for (const Ort::ConstEpAssignedSubgraph& part : graph.session.GetEpGraphAssignmentInfo()) {
        if (part.GetEpName() == provider) continue;
        for (const Ort::ConstEpAssignedNode& node : part.GetNodes()) ++counts[node.GetOperatorType()];
    }
    return counts;
#else
    return std::nullopt;
#endif
}

std::optional<std::string> heavy_on_cpu(const std::map<std::string, int>& on_cpu, const std::string& provider) {
    std::string names;
    for (const char* name : heavy)
        if (const auto at = on_cpu.find(name); at != on_cpu.end())
            names += (names.empty() ? "" : ", ") + std::to_string(at->second) + " " + name;
    if (names.empty()) return std::nullopt;
    return provider + " leaves operators that carry the work to the CPU: " + names + "; every step waits for them and for copies";
}

} // namespace mars
