// What the stub of the provider knows, and the library behind it. Of tests and of what they ask it knows nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <onnxruntime_c_api.h>

#include "ort_stub/cuda_provider.hpp"

namespace cuda_provider {

using Options = std::map<std::string, std::string>;
using Bytes = std::vector<unsigned char>;

/// A tensor that is bound: where it lies, and what keeps it there.
struct Tensor {
    unsigned char* address = nullptr;
    std::size_t num_bytes = 0;
    std::vector<std::int64_t> shape;
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    bool is_there = false;
    std::shared_ptr<Bytes> copy;

    void take() {
        copy = std::make_shared<Bytes>(address, address + num_bytes);
        address = copy->data();
    }
};

using Bound = std::map<std::string, Tensor>;

struct Binding {
    OrtSession* session = nullptr;
    Bound inputs, outputs;
};

struct Session {
    bool captures = false;
    std::map<std::pair<std::thread::id, std::int64_t>, Binding> kept;
};

/// What the provider knows.
struct State {
    std::mutex mutex, gpu; // gpu: held by who calls CUDA
    OrtStub said;
    std::map<const void*, Options> of_options; // session options -> the provider's
    std::map<const OrtSession*, Session> sessions;
    std::map<const OrtIoBinding*, Binding> bindings;
    std::map<const OrtValue*, Tensor> values;
    std::map<const OrtRunOptions*, std::int64_t> numbers;
    std::map<const OrtMemoryInfo*, bool> infos;     // of the provider: whether its memory is on the GPU, or page-locked on the host
    std::map<const OrtAllocator*, bool> allocators; // the same
    std::map<unsigned char*, std::size_t> memory;
    std::atomic<int> num_capturing{0};
};

inline State& state() {
    static State one;
    return one;
}

inline const OrtApiBase* base() {
    using Get = const OrtApiBase* (*)();
    static const Get get = reinterpret_cast<Get>(dlsym(RTLD_NEXT, "OrtGetApiBase"));
    return get();
}

inline const OrtApi& real() { return *base()->GetApi(ORT_API_VERSION); }

inline OrtStatus* refused(const std::string& words) { return real().CreateStatus(ORT_FAIL, words.c_str()); }

/// A rule was broken: the test finds it, and the caller an error.
inline OrtStatus* broken(const std::string& rule) {
    state().said.violations.push_back(rule);
    return refused("the stub: " + rule);
}

/// Alone on the GPU, where a step may be captured.
class Alone {
  public:
    Alone() {
        if (state().num_capturing == 0) return;
        is_mine_ = state().gpu.try_lock();
        const std::lock_guard<std::mutex> lock(state().mutex);
        state().said.threads.insert(std::this_thread::get_id());
        if (!is_mine_) state().said.violations.emplace_back("two threads on the GPU while a step may be captured");
    }
    ~Alone() {
        if (is_mine_) state().gpu.unlock();
    }
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

  private:
    bool is_mine_ = false;
};

} // namespace cuda_provider
