// A GPU whose memory is the host's, so that sanitizers watch it. Work waits on the stream until somebody synchronizes.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "stub.hpp"

constexpr std::size_t most_memory = std::size_t{1} << 30; // bytes of one allocation

using Work = std::vector<std::function<void()>>;

struct StubGraph {
    Work work;
};

struct StubStream {
    Work waiting;
    bool is_capturing = false;
    Work captured;
};

namespace stub {

State& state() {
    static State all;
    return all;
}

void reset() { state() = State(); }

void submit(cudaStream_t stream, std::function<void()> work) {
    (stream->is_capturing ? stream->captured : stream->waiting).push_back(std::move(work));
}

namespace {

void note(const char* what, std::size_t num_bytes) { state().events.emplace_back(what, num_bytes); }

const char* name_of(cudaMemcpyKind kind) {
    return kind == cudaMemcpyHostToDevice ? "upload" : kind == cudaMemcpyDeviceToHost ? "download" : "copy";
}

} // namespace

} // namespace stub

const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "the stub refuses"; }

const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "stubError"; }

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
    *count = stub::state().num_devices;
    return stub::state().num_devices < 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {"Stub GPU", 8, 6};
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = stub::state().driver;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue; // a capture on another would break with the legacy stream's work
    if (stub::state().num_devices < 1) return cudaErrorNoDevice;
    *stream = new StubStream;
    ++stub::state().streams;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    --stub::state().streams;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const Work waiting = std::exchange(stream->waiting, {});
    for (const auto& work : waiting) work();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t num_bytes) {
    stub::State& state = stub::state();
    if (state.has_no_memory || num_bytes > most_memory) return cudaErrorMemoryAllocation;
    auto* bytes = static_cast<unsigned char*>(::operator new(num_bytes));
    std::memset(bytes, 0xFF, num_bytes); // NaN and -1: nothing may be read before it is written
    state.memory[bytes] = num_bytes;
    state.allocations.push_back(num_bytes);
    *memory = bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
    stub::state().memory.erase(static_cast<unsigned char*>(memory));
    ::operator delete(memory);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t num_bytes, cudaStream_t stream) {
    stub::submit(stream, [=] { std::memset(memory, value, num_bytes); });
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    stub::submit(stream, [=] {
        stub::note(stub::name_of(kind), num_bytes);
        if (num_bytes > 0) std::memcpy(target, source, num_bytes);
    });
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    stub::submit(stream, [=] {
        stub::note(stub::name_of(kind), width * height);
        for (std::size_t i = 0; i < height; ++i)
            std::memcpy(static_cast<char*>(target) + i * target_pitch, static_cast<const char*>(source) + i * source_pitch, width);
    });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream->is_capturing) return cudaErrorInvalidValue;
    if (stub::state().refuses == stub::Refuses::begin) return cudaErrorStreamCaptureUnsupported;
    stream->is_capturing = true;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    stream->is_capturing = false;
    Work captured = std::exchange(stream->captured, {});
    *graph = nullptr;
    if (stub::state().refuses == stub::Refuses::end) return cudaErrorStreamCaptureUnsupported;
    ++stub::state().captures;
    *graph = new StubGraph{std::move(captured)};
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* launchable, cudaGraph_t graph, unsigned long long) {
    if (stub::state().refuses == stub::Refuses::instantiate) return cudaErrorMemoryAllocation;
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
    delete launchable;
    ++stub::state().forgotten;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t launchable, cudaStream_t stream) {
    ++stub::state().launches;
    for (const auto& work : launchable->work) stub::submit(stream, work);
    return cudaSuccess;
}
