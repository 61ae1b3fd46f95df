#include "device/trt/cuda.hpp"

#include <algorithm>
#include <cuda_runtime_api.h>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "machine.hpp"

namespace mars {

namespace {

constexpr std::size_t least = 256;                  // bytes: an empty tensor needs its own address too
constexpr std::size_t large = std::size_t{1} << 20; // bytes: smaller allocations are not checked

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

void check(const char* call, cudaError_t error) {
    if (error == cudaSuccess) return;
    int ours = 0, driver = 0; // 0 without a driver, which is the same error
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0 &&
        cudaRuntimeGetVersion(&ours) == cudaSuccess)
        throw SessionError("libmars was built with CUDA " + version(ours) + ", this driver is for CUDA " + version(driver) +
                           ": update the driver, or build libmars here");
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice)
        throw SessionError("no NVIDIA GPU with a working driver is here (check with nvidia-smi)");
    cudaGetLastError(); // clear it: TensorRT must not see it after a launch of its own
    const std::string name = cudaGetErrorName(error);
    const std::string what = std::string("CUDA: ") + call + " failed: " + cudaGetErrorString(error) + " (" + name + ")";
    if (is_lasting(name)) throw DeviceLost(what + lost_advice);
    if (error == cudaErrorMemoryAllocation) throw MemoryError(what);
    throw DeviceError(what);
}

/// Clear the error: a refused capture must not fail the next call.
Device::Graph refused() {
    cudaGetLastError();
    return nullptr;
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

} // namespace

void find_gpu(int number, Here& here) {
    try {
        int count = 0, driver = 0;
        check("cudaGetDeviceCount", cudaGetDeviceCount(&count));
        if (number >= count) {
            here.no_gpu = count == 0 ? "no NVIDIA GPU is visible"
                                     : "no GPU " + std::to_string(number) + " is visible: the last of " + std::to_string(count) + " is " +
                                           std::to_string(count - 1) + " (CUDA_VISIBLE_DEVICES, nvidia-smi)";
            return;
        }
        cudaDeviceProp properties{};
        check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, number));
        check("cudaDriverGetVersion", cudaDriverGetVersion(&driver));
        here.gpu = "sm" + std::to_string(properties.major) + std::to_string(properties.minor);
        here.gpu_name = properties.name;
        here.driver = version(driver);
    } catch (const SessionError& error) {
        here.no_gpu = error.what();
    }
}

void Device::Forget::operator()(void* graph) const { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

Device::Current::Current(int wanted) : wanted_(wanted) {
    check("cudaGetDevice", cudaGetDevice(&found_));
    if (found_ != wanted_) check("cudaSetDevice", cudaSetDevice(wanted_));
}

Device::Current::~Current() {
    if (found_ != wanted_) cudaSetDevice(found_);
}

Device::Device(int number, void* stream) : number_(number), owns_stream_(stream == nullptr), stream_(stream) {
    const Current current(number_);
    int is_integrated = 0;
    check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&is_integrated, cudaDevAttrIntegrated, number_));
    is_integrated_ = is_integrated != 0;
    if (!owns_stream_) return;
    cudaStream_t own = nullptr;
    // Not ordered with the legacy stream: work of others on that stream would break a capture.
    check("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    stream_ = own;
}

Device::~Device() {
    try {
        const Current current(number_);
        cudaStreamSynchronize(stream_of(stream_));
        for (const Address address : allocated_) cudaFree(pointer(address));
        for (void* memory : pinned_) cudaFreeHost(memory);
        if (owns_stream_) cudaStreamDestroy(stream_of(stream_));
    } catch (const SessionError&) { // the GPU has failed; its memory goes with the process
    }
}

std::optional<std::int64_t> Device::free_memory() const {
    if (is_integrated_) return available_memory();
    const Current current(number_);
    std::size_t free = 0, total = 0;
    check("cudaMemGetInfo", cudaMemGetInfo(&free, &total));
    return static_cast<std::int64_t>(free);
}

void Device::require(std::size_t num_bytes) const {
    if (!is_integrated_ || num_bytes < large) return;
    const auto free = available_memory();
    if (free && static_cast<std::int64_t>(num_bytes) > *free)
        throw MemoryError("the GPU shares the system's memory: " + std::to_string(num_bytes / 1'000'000) + " MB are needed and " +
                          std::to_string(*free / 1'000'000) + " MB are available");
}

Address Device::allocate(std::size_t num_bytes) {
    require(num_bytes);
    void* memory = nullptr;
    check("cudaMalloc", cudaMalloc(&memory, std::max(num_bytes, least)));
    allocated_.push_back(reinterpret_cast<Address>(memory));
    zero(allocated_.back(), std::max(num_bytes, least));
    return allocated_.back();
}

unsigned char* Device::pinned(std::size_t num_bytes) {
    void* memory = nullptr;
    check("cudaHostAlloc", cudaHostAlloc(&memory, std::max(num_bytes, least), cudaHostAllocDefault));
    pinned_.push_back(memory);
    return static_cast<unsigned char*>(memory);
}

void Device::release(Address address) {
    allocated_.erase(std::remove(allocated_.begin(), allocated_.end(), address), allocated_.end());
    synchronize();
    check("cudaFree", cudaFree(pointer(address)));
}

void Device::zero(Address address, std::size_t num_bytes) {
    check("cudaMemsetAsync", cudaMemsetAsync(pointer(address), 0, num_bytes, stream_of(stream_)));
}

void Device::upload(Address address, const void* data, std::size_t num_bytes) {
    check("cudaMemcpyAsync", cudaMemcpyAsync(pointer(address), data, num_bytes, cudaMemcpyHostToDevice, stream_of(stream_)));
}

void Device::download(void* data, Address address, std::size_t num_bytes) {
    check("cudaMemcpyAsync", cudaMemcpyAsync(data, pointer(address), num_bytes, cudaMemcpyDeviceToHost, stream_of(stream_)));
}

void Device::copy_runs(const Runs& target, const Runs& source, std::size_t width, std::size_t height, std::size_t depth) {
    cudaMemcpy3DParms copy{};
    copy.dstPtr = {pointer(target.address), target.pitch, target.pitch, target.per_slice};
    copy.srcPtr = {pointer(source.address), source.pitch, source.pitch, source.per_slice};
    copy.extent = {width, height, depth};
    copy.kind = cudaMemcpyDeviceToDevice;
    check("cudaMemcpy3DAsync", cudaMemcpy3DAsync(&copy, stream_of(stream_)));
}

void Device::synchronize() { check("cudaStreamSynchronize", cudaStreamSynchronize(stream_of(stream_))); }

void Device::settle() noexcept {
    if (cudaStreamSynchronize(stream_of(stream_)) != cudaSuccess) cudaGetLastError();
}

Device::Graph Device::capture(const std::function<bool()>& enqueue) {
    if (cudaStreamBeginCapture(stream_of(stream_), cudaStreamCaptureModeThreadLocal) != cudaSuccess) return refused();
    const bool done = enqueue();
    cudaGraph_t graph = nullptr;
    // Ends the capture even if it was refused; otherwise the stream is not usable again.
    const cudaError_t ended = cudaStreamEndCapture(stream_of(stream_), &graph);
    cudaGraphExec_t launchable = nullptr;
    const bool good = done && ended == cudaSuccess && cudaGraphInstantiateWithFlags(&launchable, graph, 0) == cudaSuccess;
    if (graph != nullptr) cudaGraphDestroy(graph);
    return good ? Graph(launchable) : refused();
}

void Device::launch(const Graph& graph) {
    check("cudaGraphLaunch", cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.get()), stream_of(stream_)));
}

} // namespace mars
