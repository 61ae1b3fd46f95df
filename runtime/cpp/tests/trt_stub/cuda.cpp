// A GPU whose memory is the host's, so that sanitizers watch it. Work waits on the stream until it is synchronized.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "stub.hpp"

constexpr std::size_t most_memory = std::size_t{1} << 30; // bytes of one allocation
constexpr std::align_val_t alignment{256};
constexpr int cuda_version = 12060; // that the stub stands for

using Work = std::vector<std::function<void()>>;
using Bytes = std::vector<unsigned char>;

struct StubGraph {
    Work work;
    std::vector<std::pair<std::weak_ptr<stub::Bound>, int>> bound; // and how often it had changed
};

struct StubStream {
    Work waiting;
    bool is_capturing = false;
    StubGraph captured;
};

namespace stub {

State& state() {
    static State all = State::of_machine();
    return all;
}

namespace {

/// Streams that were not destroyed yet.
std::set<cudaStream_t>& streams() {
    static std::set<cudaStream_t> all;
    return all;
}

} // namespace

State State::of_machine() {
    State all;
    const char* text = std::getenv("MARS_STUB");
    if (text == nullptr) return all;
    const auto said = nlohmann::json::parse(text);
    all.num_devices = said.value("num_devices", all.num_devices);
    all.gpu = said.value("gpu", all.gpu);
    all.capability = said.value("capability", all.capability);
    all.version = said.value("version", all.version);
    all.breaks_after = said.value("breaks_after", -1);
    return all;
}

void reset() {
    // What a GPU that failed has left behind goes with its process.
    for (const auto* memory : {&state().memory, &state().locked})
        for (const auto& each : *memory) ::operator delete(each.first, alignment);
    for (cudaStream_t stream : streams()) delete stream;
    streams().clear();
    state() = State();
}

void submit(cudaStream_t stream, std::function<void()> work, const std::shared_ptr<Bound>& bound) {
    if (!stream->is_capturing) {
        stream->waiting.push_back(std::move(work));
        return;
    }
    stream->captured.work.push_back(std::move(work));
    if (bound) stream->captured.bound.emplace_back(bound, bound->changes);
}

bool is_capturing(cudaStream_t stream) { return stream->is_capturing; }

int& current() {
    thread_local int device = 0;
    return device;
}

cudaError_t& last_error() {
    thread_local cudaError_t error = cudaSuccess;
    return error;
}

namespace {

void note(const char* what, std::size_t num_bytes) { state().events.emplace_back(what, num_bytes); }

const char* name_of(cudaMemcpyKind kind) {
    return kind == cudaMemcpyHostToDevice ? "upload" : kind == cudaMemcpyDeviceToHost ? "download" : "copy";
}

cudaError_t failed(cudaError_t error) { return last_error() = error; }

/// What every call that the stream or the memory is for fails with, if it does.
cudaError_t refusal(cudaStream_t stream = nullptr) {
    if (state().is_broken) return failed(cudaErrorIllegalAddress);
    if (current() != state().gpu) return failed(cudaErrorInvalidResourceHandle); // the stream and the memory are of one GPU
    // Nothing here may be captured, and none of it is allowed in the thread that captures.
    if (stream != nullptr ? stream->is_capturing : state().is_capturing) {
        state().is_spoiled = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

unsigned char* at(const cudaPitchedPtr& runs, std::size_t y, std::size_t z) {
    return static_cast<unsigned char*>(runs.ptr) + (z * runs.ysize + y) * runs.pitch;
}

} // namespace

} // namespace stub

const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                              : "the stub refuses";
}

const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation        ? "cudaErrorMemoryAllocation"
           : error == cudaErrorIllegalAddress        ? "cudaErrorIllegalAddress"
           : error == cudaErrorInvalidResourceHandle ? "cudaErrorInvalidResourceHandle"
                                                     : "stubError";
}

cudaError_t cudaGetLastError() { return std::exchange(stub::last_error(), cudaSuccess); }

cudaError_t cudaGetDevice(int* device) {
    if (stub::state().is_broken) return stub::failed(cudaErrorIllegalAddress);
    *device = stub::current();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    stub::current() = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = stub::state().num_devices;
    if (stub::state().driver < cuda_version) return cudaErrorInsufficientDriver;
    return stub::state().num_devices < 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {"Stub GPU"};
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = stub::state().driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = cuda_version;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const auto other = stub::state().others.find(device);
    const int capability = other == stub::state().others.end() ? stub::state().capability : other->second;
    *value = attribute == cudaDevAttrIntegrated               ? stub::state().is_integrated
             : attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10
                                                              : capability % 10;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    const stub::State& now = stub::state();
    *free = *total = std::size_t{8} << 30;
    for (const auto& [address, size] : now.memory) *free -= size;
    for (const stub::Bound* context : now.contexts) *free -= context != nullptr ? now.context_bytes : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    if (const cudaError_t error = stub::refusal()) return error;
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue; // a capture on another would break with the legacy stream's work
    if (stub::state().num_devices < 1) return cudaErrorNoDevice;
    *stream = new StubStream;
    stub::streams().insert(*stream);
    ++stub::state().streams;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    stub::streams().erase(stream);
    delete stream;
    --stub::state().streams;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    ++stub::state().waits;
    const Work waiting = std::exchange(stream->waiting, {});
    for (const auto& work : waiting) work();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t num_bytes) {
    if (const cudaError_t error = stub::refusal()) return error;
    stub::State& state = stub::state();
    if (state.has_no_memory || num_bytes > most_memory) return stub::failed(cudaErrorMemoryAllocation);
    auto* bytes = static_cast<unsigned char*>(::operator new(num_bytes, alignment));
    std::memset(bytes, 0xFF, num_bytes); // NaN and -1: nothing may be read before it is written
    state.memory[bytes] = num_bytes;
    state.allocations.push_back(num_bytes);
    *memory = bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
    if (const cudaError_t error = stub::refusal(); error != cudaSuccess && !stub::state().is_broken) return error;
    if (stub::state().memory.erase(static_cast<unsigned char*>(memory)) == 0) return stub::failed(cudaErrorInvalidValue);
    ::operator delete(memory, alignment);
    return stub::state().is_broken ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t num_bytes, unsigned flags) {
    if (const cudaError_t error = stub::refusal()) return error;
    if (flags != cudaHostAllocDefault) return stub::failed(cudaErrorInvalidValue);
    if (stub::state().has_no_memory || num_bytes > most_memory) return stub::failed(cudaErrorMemoryAllocation);
    auto* bytes = static_cast<unsigned char*>(::operator new(num_bytes, alignment));
    std::memset(bytes, 0xFF, num_bytes);
    stub::state().locked[bytes] = num_bytes;
    *memory = bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
    if (const cudaError_t error = stub::refusal(); error != cudaSuccess && !stub::state().is_broken) return error;
    if (stub::state().locked.erase(static_cast<unsigned char*>(memory)) == 0) return stub::failed(cudaErrorInvalidValue);
    ::operator delete(memory, alignment);
    return stub::state().is_broken ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t num_bytes, cudaStream_t stream) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    stub::submit(stream, [=] { std::memset(memory, value, num_bytes); });
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    stub::submit(stream, [=] {
        stub::note(stub::name_of(kind), num_bytes);
        if (num_bytes > 0) std::memcpy(target, source, num_bytes);
    });
    return cudaSuccess;
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy, cudaStream_t stream) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    const auto [width, height, depth] = copy->extent;
    for (const cudaPitchedPtr& runs : {copy->srcPtr, copy->dstPtr}) {
        if (width > runs.pitch) return stub::failed(cudaErrorInvalidPitchValue);
        if (height > runs.ysize) return stub::failed(cudaErrorInvalidValue); // slices would overlap
    }
    stub::submit(stream, [copied = *copy] {
        const std::size_t w = copied.extent.width, h = copied.extent.height, d = copied.extent.depth;
        stub::note(stub::name_of(copied.kind), w * h * d);
        Bytes read;
        for (std::size_t z = 0; z < d; ++z)
            for (std::size_t y = 0; y < h; ++y) read.insert(read.end(), stub::at(copied.srcPtr, y, z), stub::at(copied.srcPtr, y, z) + w);
        const auto each_target = [&](const auto& visit) {
            for (std::size_t z = 0; z < d; ++z)
                for (std::size_t y = 0; y < h; ++y) visit(stub::at(copied.dstPtr, y, z), (z * h + y) * w);
        };
        each_target([&](unsigned char* run, std::size_t) { std::memset(run, 0xEE, w); });
        Bytes again;
        for (std::size_t z = 0; z < d; ++z)
            for (std::size_t y = 0; y < h; ++y) again.insert(again.end(), stub::at(copied.srcPtr, y, z), stub::at(copied.srcPtr, y, z) + w);
        if (read != again) throw std::logic_error("a copy whose source and target overlap");
        each_target([&](unsigned char* run, std::size_t from) { std::memcpy(run, read.data() + from, w); });
    });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    if (stub::state().refuses == stub::Refuses::begin) return stub::failed(cudaErrorStreamCaptureUnsupported);
    stream->is_capturing = stub::state().is_capturing = true;
    stub::state().is_spoiled = false;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    stream->is_capturing = stub::state().is_capturing = false;
    StubGraph captured = std::exchange(stream->captured, {});
    *graph = nullptr;
    if (stub::state().refuses == stub::Refuses::end || stub::state().is_spoiled) return stub::failed(cudaErrorStreamCaptureUnsupported);
    ++stub::state().captures;
    *graph = new StubGraph{std::move(captured)};
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* launchable, cudaGraph_t graph, unsigned long long) {
    if (stub::state().refuses == stub::Refuses::instantiate) return stub::failed(cudaErrorMemoryAllocation);
    *launchable = new StubGraph(*graph);
    ++stub::state().graphs;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    --stub::state().captures;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t launchable) {
    for (const auto& each : launchable->bound)
        if (each.first.expired()) ++stub::state().orphans;
    delete launchable;
    ++stub::state().forgotten;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t launchable, cudaStream_t stream) {
    if (const cudaError_t error = stub::refusal(stream)) return error;
    for (const auto& [bound, changes] : launchable->bound) {
        const auto now = bound.lock();
        if (!now || now->changes != changes) return stub::failed(cudaErrorInvalidValue); // its context is gone, or of something else
    }
    if (stub::state().breaks_after == 0) return stub::state().is_broken = true, stub::failed(cudaErrorIllegalAddress);
    if (stub::state().breaks_after > 0) --stub::state().breaks_after;
    ++stub::state().launches;
    for (const auto& work : launchable->work) stub::submit(stream, work);
    return cudaSuccess;
}
