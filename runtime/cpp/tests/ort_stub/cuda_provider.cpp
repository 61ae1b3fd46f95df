// The C interface's functions that have to do with the provider; all others are the library's.
#include "ort_stub/cuda_provider.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <onnxruntime_c_api.h>

#include "ort_stub/runs.hpp"
#include "ort_stub/state.hpp"

namespace cuda_provider {

namespace {

constexpr const char* provider = "CUDAExecutionProvider";

template <typename Create>
OrtStatus* created(const OrtSessionOptions* options, OrtSession** out, const Create& create) {
    std::optional<Options> own;
    {
        const std::lock_guard<std::mutex> lock(state().mutex);
        const auto at = state().of_options.find(options);
        if (at != state().of_options.end()) own = at->second;
    }
    if (!own) return create();
    const Alone alone;
    OrtStub& said = state().said;
    const bool captures = (*own)["enable_cuda_graph"] == "1";
    if ((*own)["enable_cuda_graph"].empty()) own->erase("enable_cuda_graph");
    {
        const std::lock_guard<std::mutex> lock(state().mutex);
        said.options.push_back(*own);
    }
    if (!said.no_session.empty()) return refused(said.no_session);
    if (captures && !said.refusal.empty()) return refused(said.refusal);
    OrtStatus* status = create();
    if (status != nullptr) return status;
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().sessions[*out].captures = captures;
    state().num_capturing += captures ? 1 : 0;
    return nullptr;
}

OrtApi patched() {
    OrtApi api = real();
    api.GetAvailableProviders = [](char*** out, int* count) noexcept -> OrtStatus* {
        static const char* names[] = {provider, "CPUExecutionProvider"};
        *out = const_cast<char**>(names);
        *count = 2;
        return nullptr;
    };
    api.ReleaseAvailableProviders = [](char**, int) noexcept -> OrtStatus* { return nullptr; };
    api.CreateCUDAProviderOptions = [](OrtCUDAProviderOptionsV2** out) noexcept -> OrtStatus* {
        *out = reinterpret_cast<OrtCUDAProviderOptionsV2*>(new Options);
        return nullptr;
    };
    api.UpdateCUDAProviderOptions = [](OrtCUDAProviderOptionsV2* options, const char* const* names, const char* const* values,
                                       std::size_t count) noexcept -> OrtStatus* {
        for (std::size_t i = 0; i < count; ++i) (*reinterpret_cast<Options*>(options))[names[i]] = values[i];
        return nullptr;
    };
    api.ReleaseCUDAProviderOptions = [](OrtCUDAProviderOptionsV2* options) noexcept { delete reinterpret_cast<Options*>(options); };
    api.SessionOptionsAppendExecutionProvider_CUDA_V2 = [](OrtSessionOptions* options,
                                                           const OrtCUDAProviderOptionsV2* own) noexcept -> OrtStatus* {
        const std::lock_guard<std::mutex> lock(state().mutex);
        state().of_options[options] = *reinterpret_cast<const Options*>(own);
        return nullptr;
    };
    api.ReleaseSessionOptions = [](OrtSessionOptions* options) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().of_options.erase(options);
        }
        real().ReleaseSessionOptions(options);
    };
    api.CreateSession = [](const OrtEnv* env, const ORTCHAR_T* path, const OrtSessionOptions* options, OrtSession** out) noexcept {
        return created(options, out, [&] { return real().CreateSession(env, path, options, out); });
    };
    api.CreateSessionFromArray = [](const OrtEnv* env, const void* data, std::size_t size, const OrtSessionOptions* options,
                                    OrtSession** out) noexcept {
        return created(options, out, [&] { return real().CreateSessionFromArray(env, data, size, options, out); });
    };
    api.ReleaseSession = [](OrtSession* session) noexcept {
        std::unique_lock<std::mutex> lock(state().mutex);
        const auto at = state().sessions.find(session);
        const bool is_ours = at != state().sessions.end(), captures = is_ours && at->second.captures;
        lock.unlock();
        if (!is_ours) return real().ReleaseSession(session);
        {
            const Alone alone;
            lock.lock();
            state().sessions.erase(session);
            lock.unlock();
            real().ReleaseSession(session);
        }
        state().num_capturing -= captures ? 1 : 0;
    };
    api.CreateMemoryInfo = [](const char* name, OrtAllocatorType type, int id, OrtMemType kind, OrtMemoryInfo** out) noexcept {
        const std::string place = name;
        const bool is_ours = place == "Cuda" || place == "CudaPinned";
        OrtStatus* status = is_ours ? real().CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, out)
                                    : real().CreateMemoryInfo(name, type, id, kind, out);
        const std::lock_guard<std::mutex> lock(state().mutex);
        if (status == nullptr && is_ours) state().infos[*out] = place == "Cuda";
        return status;
    };
    api.ReleaseMemoryInfo = [](OrtMemoryInfo* info) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().infos.erase(info);
        }
        real().ReleaseMemoryInfo(info);
    };
    api.CreateAllocator = [](const OrtSession* session, const OrtMemoryInfo* info, OrtAllocator** out) noexcept {
        OrtStatus* status = real().CreateAllocator(session, info, out);
        const std::lock_guard<std::mutex> lock(state().mutex);
        if (status != nullptr || state().infos.count(info) == 0) return status;
        const auto at = state().sessions.find(session);
        if (at == state().sessions.end()) return broken("memory of the GPU from a session that is not there");
        const bool is_there = state().infos.at(info);
        if (is_there && at->second.captures) return broken("memory that captured steps write intermediate results to");
        state().allocators[*out] = is_there;
        return status;
    };
    api.AllocatorAlloc = [](OrtAllocator* allocator, std::size_t size, void** out) noexcept {
        std::unique_lock<std::mutex> lock(state().mutex);
        const auto at = state().allocators.find(allocator);
        const bool is_ours = at != state().allocators.end(), is_there = is_ours && at->second;
        lock.unlock();
        if (!is_ours) return real().AllocatorAlloc(allocator, size, out);
        const Alone alone;
        OrtStatus* status = real().AllocatorAlloc(allocator, size, out);
        if (status != nullptr || !is_there) return status;
        lock.lock();
        std::memset(*out, 77, size); // it is not zero on a GPU
        state().memory[static_cast<unsigned char*>(*out)] = size;
        state().said.live = state().memory.size();
        return status;
    };
    api.AllocatorFree = [](OrtAllocator* allocator, void* address) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().memory.erase(static_cast<unsigned char*>(address));
            state().said.live = state().memory.size();
        }
        return real().AllocatorFree(allocator, address);
    };
    api.CreateTensorWithDataAsOrtValue = [](const OrtMemoryInfo* info, void* data, std::size_t size, const std::int64_t* shape,
                                            std::size_t rank, ONNXTensorElementDataType type, OrtValue** out) noexcept {
        OrtStatus* status = real().CreateTensorWithDataAsOrtValue(info, data, size, shape, rank, type, out);
        const std::lock_guard<std::mutex> lock(state().mutex);
        const auto at = state().infos.find(info);
        const bool is_there = at != state().infos.end() && at->second;
        if (status == nullptr)
            state().values[*out] = {static_cast<unsigned char*>(data), size, {shape, shape + rank}, type, is_there, nullptr};
        return status;
    };
    api.ReleaseValue = [](OrtValue* value) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().values.erase(value);
        }
        real().ReleaseValue(value);
    };
    api.CreateIoBinding = [](OrtSession* session, OrtIoBinding** out) noexcept {
        OrtStatus* status = real().CreateIoBinding(session, out);
        const std::lock_guard<std::mutex> lock(state().mutex);
        if (status == nullptr && state().sessions.count(session) != 0) state().bindings[*out].session = session;
        return status;
    };
    api.ReleaseIoBinding = [](OrtIoBinding* binding) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().bindings.erase(binding);
        }
        real().ReleaseIoBinding(binding);
    };
    api.BindInput = [](OrtIoBinding* binding, const char* name, const OrtValue* value) noexcept -> OrtStatus* {
        std::unique_lock<std::mutex> lock(state().mutex);
        const auto at = state().bindings.find(binding);
        const bool is_ours = at != state().bindings.end();
        lock.unlock();
        if (!is_ours) return real().BindInput(binding, name, value);
        const Alone alone;
        lock.lock();
        Tensor tensor = state().values.at(value);
        const bool is_read_there = std::string(name) != "shared" && !state().said.on_host(name);
        if (is_read_there != tensor.is_there) tensor.take(); // copied now; nobody looks there again
        at->second.inputs[name] = std::move(tensor);
        return nullptr;
    };
    api.BindOutput = [](OrtIoBinding* binding, const char* name, const OrtValue* value) noexcept -> OrtStatus* {
        const std::lock_guard<std::mutex> lock(state().mutex);
        const auto at = state().bindings.find(binding);
        if (at == state().bindings.end()) return real().BindOutput(binding, name, value);
        at->second.outputs[name] = state().values.at(value);
        return nullptr;
    };
    api.ClearBoundInputs = [](OrtIoBinding* binding) noexcept {
        const std::lock_guard<std::mutex> lock(state().mutex);
        const auto at = state().bindings.find(binding);
        at == state().bindings.end() ? real().ClearBoundInputs(binding) : at->second.inputs.clear();
    };
    api.ClearBoundOutputs = [](OrtIoBinding* binding) noexcept {
        const std::lock_guard<std::mutex> lock(state().mutex);
        const auto at = state().bindings.find(binding);
        at == state().bindings.end() ? real().ClearBoundOutputs(binding) : at->second.outputs.clear();
    };
    api.AddRunConfigEntry = [](OrtRunOptions* options, const char* name, const char* value) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            if (std::string(name) == "gpu_graph_id") state().numbers[options] = std::stoll(value);
        }
        return real().AddRunConfigEntry(options, name, value);
    };
    api.ReleaseRunOptions = [](OrtRunOptions* options) noexcept {
        {
            const std::lock_guard<std::mutex> lock(state().mutex);
            state().numbers.erase(options);
        }
        real().ReleaseRunOptions(options);
    };
    api.RunWithBinding = [](OrtSession* session, const OrtRunOptions* options, const OrtIoBinding* binding) noexcept -> OrtStatus* {
        std::unique_lock<std::mutex> lock(state().mutex);
        const auto at = state().bindings.find(binding);
        if (at == state().bindings.end()) {
            lock.unlock();
            return real().RunWithBinding(session, options, binding);
        }
        lock.unlock();
        const Alone alone;
        lock.lock();
        return run(session, options, at->second);
    };
    return api;
}

} // namespace

} // namespace cuda_provider

std::size_t OrtStub::count(const std::string& how) const {
    return static_cast<std::size_t>(std::count_if(runs.begin(), runs.end(), [&](const Run& each) { return each.how == how; }));
}

OrtStub& ort_stub() { return cuda_provider::state().said; }

/// In place of the library's.
extern "C" const OrtApiBase* ORT_API_CALL OrtGetApiBase() noexcept {
    static const OrtApi api = cuda_provider::patched();
    static const OrtApiBase mine{[](std::uint32_t) noexcept -> const OrtApi* { return &api; }, cuda_provider::base()->GetVersionString};
    return &mine;
}
