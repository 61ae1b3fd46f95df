// ONNX Runtime's CUDA provider, played by its CPU provider and the stub of the CUDA runtime: a captured run is replayed as it was bound,
// and a capturing run is two runs, as of the real one.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/ort/api.hpp"
#include "trt_stub/stub.hpp"

namespace fake_ort {

struct Tensor {
    void* data;
    std::vector<std::int64_t> shape;
    ONNXTensorElementDataType type;
};
using Bound = std::map<std::pair<bool, std::string>, Tensor>; // by whether it is an output, and name

struct State {
    std::recursive_mutex mutex;
    const OrtApi* real = nullptr;
    std::map<const OrtIoBinding*, Bound> bindings;
    std::map<const OrtRunOptions*, std::int64_t> ids;
    std::map<std::pair<std::int64_t, std::thread::id>, Bound> captured;
    std::map<std::string, std::string> options; // of the provider
    cudaStream_t stream = nullptr;
    bool refuses_capture = false, fails = false;
    std::vector<std::pair<std::string, std::int64_t>> runs; // how, and of how many slots

    std::int64_t count(const std::string& how) const {
        std::int64_t number = 0;
        for (const auto& run : runs) number += run.first == how;
        return number;
    }
};

inline State& state() {
    static State all;
    return all;
}

inline OrtStatus* note(const OrtIoBinding* binding, bool is_output, const char* name, const OrtValue* value) {
    const std::lock_guard<std::recursive_mutex> lock(state().mutex);
    const Ort::ConstValue tensor{value};
    const auto info = tensor.GetTensorTypeAndShapeInfo();
    state().bindings[binding][{is_output, name}] = {const_cast<void*>(tensor.GetTensorRawData()), info.GetShape(), info.GetElementType()};
    return nullptr;
}

/// Run what was bound when a step was captured.
inline OrtStatus* replay(OrtSession* session, const OrtRunOptions* options, const Bound& bound) {
    OrtIoBinding* binding = nullptr;
    if (OrtStatus* error = state().real->CreateIoBinding(session, &binding)) return error;
    const Ort::MemoryInfo place = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    for (const auto& [key, tensor] : bound) {
        std::size_t num_bytes = tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64     ? 8
                                : tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2
                                                                                       : 4;
        for (const std::int64_t size : tensor.shape) num_bytes *= static_cast<std::size_t>(size);
        const auto value = Ort::Value::CreateTensor(place, tensor.data, num_bytes, tensor.shape.data(), tensor.shape.size(), tensor.type);
        const auto bind = key.first ? state().real->BindOutput : state().real->BindInput;
        Ort::ThrowOnError(bind(binding, key.second.c_str(), value));
    }
    OrtStatus* const status = state().real->RunWithBinding(session, options, binding);
    state().real->ReleaseIoBinding(binding);
    return status;
}

inline OrtStatus* run(OrtSession* session, const OrtRunOptions* options, const OrtIoBinding* binding) {
    const std::lock_guard<std::recursive_mutex> lock(state().mutex);
    State& all = state();
    const auto id = all.ids.find(options);
    if (id == all.ids.end()) return all.real->RunWithBinding(session, options, binding); // on the CPU
    if (all.fails) return all.real->CreateStatus(ORT_FAIL, "Failed to allocate memory for requested buffer");
    cudaStreamSynchronize(all.stream); // work waits there
    Bound bound = all.bindings.at(binding);
    const std::pair key{id->second, std::this_thread::get_id()};
    const auto captured = all.captured.find(key);
    const char* how = id->second < 0 ? "eager" : captured == all.captured.end() ? "capture" : "replay";
    if (captured != all.captured.end()) bound = captured->second;
    all.runs.emplace_back(how, bound.at({false, "input_ids"}).shape[1]);
    if (std::string(how) == "capture") {
        all.captured[key] = bound;
        if (OrtStatus* error = replay(session, options, bound)) return error;
    }
    return replay(session, options, bound);
}

/// From here on there is a GPU. A test begins with it.
inline void pretend() {
    stub::reset();
    mars::init_ort();
    State& all = state();
    if (all.real == nullptr) all.real = &Ort::GetApi();
    all.bindings.clear(), all.ids.clear(), all.captured.clear(), all.options.clear(), all.runs.clear();
    all.refuses_capture = all.fails = false;
    static OrtApi api;
    api = *all.real;
    api.GetAvailableProviders = [](char*** names, int* count) noexcept -> OrtStatus* {
        static char cpu[] = "CPUExecutionProvider", cuda[] = "CUDAExecutionProvider";
        static char* both[] = {cuda, cpu};
        return *names = both, *count = 2, nullptr;
    };
    api.ReleaseAvailableProviders = [](char**, int) noexcept -> OrtStatus* { return nullptr; };
    api.CreateCUDAProviderOptions = [](OrtCUDAProviderOptionsV2** options) noexcept -> OrtStatus* {
        return *options = reinterpret_cast<OrtCUDAProviderOptionsV2*>(&state()), nullptr;
    };
    api.ReleaseCUDAProviderOptions = [](OrtCUDAProviderOptionsV2*) noexcept {};
    api.UpdateCUDAProviderOptions = [](OrtCUDAProviderOptionsV2*, const char* const* names, const char* const* values,
                                       std::size_t count) noexcept -> OrtStatus* {
        for (std::size_t i = 0; i < count; ++i) state().options[names[i]] = values[i];
        return nullptr;
    };
    api.UpdateCUDAProviderOptionsWithValue = [](OrtCUDAProviderOptionsV2*, const char*, void* value) noexcept -> OrtStatus* {
        return state().stream = static_cast<cudaStream_t>(value), nullptr;
    };
    api.SessionOptionsAppendExecutionProvider_CUDA_V2 = [](OrtSessionOptions*, const OrtCUDAProviderOptionsV2*) noexcept -> OrtStatus* {
        if (!state().refuses_capture || state().options.at("enable_cuda_graph") == "0") return nullptr;
        return state().real->CreateStatus(ORT_FAIL, "This session cannot use the graph capture feature as requested by the user");
    };
    api.CreateMemoryInfo = [](const char*, OrtAllocatorType type, int, OrtMemType kind, OrtMemoryInfo** info) noexcept {
        return state().real->CreateMemoryInfo("Cpu", type, 0, kind, info);
    };
    api.CreateIoBinding = [](OrtSession* session, OrtIoBinding** binding) noexcept -> OrtStatus* {
        const std::lock_guard<std::recursive_mutex> lock(state().mutex);
        OrtStatus* const status = state().real->CreateIoBinding(session, binding);
        return state().bindings[*binding].clear(), status;
    };
    api.BindInput = [](OrtIoBinding* binding, const char* name, const OrtValue* value) noexcept -> OrtStatus* {
        note(binding, false, name, value);
        return state().real->BindInput(binding, name, value);
    };
    api.BindOutput = [](OrtIoBinding* binding, const char* name, const OrtValue* value) noexcept -> OrtStatus* {
        note(binding, true, name, value);
        return state().real->BindOutput(binding, name, value);
    };
    api.CreateRunOptions = [](OrtRunOptions** options) noexcept -> OrtStatus* {
        const std::lock_guard<std::recursive_mutex> lock(state().mutex);
        OrtStatus* const status = state().real->CreateRunOptions(options);
        return state().ids.erase(*options), status;
    };
    api.AddRunConfigEntry = [](OrtRunOptions* options, const char* key, const char* value) noexcept -> OrtStatus* {
        const std::lock_guard<std::recursive_mutex> lock(state().mutex);
        if (std::string(key) == "gpu_graph_id") state().ids[options] = std::stoll(value);
        return state().real->AddRunConfigEntry(options, key, value);
    };
    api.RunWithBinding = [](OrtSession* session, const OrtRunOptions* options, const OrtIoBinding* binding) noexcept -> OrtStatus* {
        return run(session, options, binding);
    };
    Ort::InitApi(&api);
}

} // namespace fake_ort
