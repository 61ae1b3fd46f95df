#include "device/cuda.hpp"

#include <algorithm>
#include <dlfcn.h>
#include <string>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "machine.hpp"

namespace mars {

namespace {

constexpr std::size_t least = 256;                  // bytes: an empty tensor needs its own address too
constexpr std::size_t large = std::size_t{1} << 20; // bytes: smaller allocations are not checked

// Values of the CUDA runtime's interface.
enum Error { out_of_memory = 2, insufficient_driver = 35, no_device = 100 };
enum Copy { to_device = 1, to_host = 2, on_device = 3 };
enum Attribute { integrated = 18, major_capability = 75, minor_capability = 76 };
constexpr unsigned not_blocking = 1; // a stream that is not ordered with the legacy stream
constexpr int of_this_thread = 1;    // a capture that other threads' calls do not break

struct Pitched {
    void* address;
    std::size_t pitch, width, height;
};
struct Copy3D {
    void* source_array = nullptr;
    std::size_t source_at[3] = {};
    Pitched source;
    void* target_array = nullptr;
    std::size_t target_at[3] = {};
    Pitched target;
    std::size_t extent[3];
    int kind;
};

/// The runtime of CUDA 13 or 12, by dlsym: libmars is compiled without CUDA, and uses the one that TensorRT or ONNX Runtime's
/// provider has loaded.
class Cudart {
    struct Symbol {
        template <typename Function>
        operator Function*() const {
            return reinterpret_cast<Function*>(address);
        }
        void* address;
    };

    static Symbol symbol(const char* name) {
        void* library = nullptr;
        for (const int mode : {RTLD_NOLOAD, 0})
            for (const char* file : {"libcudart.so.13", "libcudart.so.12"})
                if (library == nullptr) library = dlopen(file, RTLD_NOW | RTLD_LOCAL | mode);
        if (library == nullptr)
            throw SessionError("no libcudart.so.13 or libcudart.so.12 is loaded or where the loader looks; install CUDA's runtime");
        void* address = dlsym(library, name);
        if (address == nullptr) throw SessionError(std::string("libcudart has no ") + name);
        return {address};
    }

  public:
    const char* (*error_text)(int) = symbol("cudaGetErrorString");
    const char* (*error_name)(int) = symbol("cudaGetErrorName");
    int (*last_error)() = symbol("cudaGetLastError");
    int (*device_count)(int*) = symbol("cudaGetDeviceCount");
    int (*get_device)(int*) = symbol("cudaGetDevice");
    int (*set_device)(int) = symbol("cudaSetDevice");
    int (*properties)(void*, int) = symbol("cudaGetDeviceProperties");
    int (*driver_version)(int*) = symbol("cudaDriverGetVersion");
    int (*runtime_version)(int*) = symbol("cudaRuntimeGetVersion");
    int (*attribute)(int*, int, int) = symbol("cudaDeviceGetAttribute");
    int (*memory_info)(std::size_t*, std::size_t*) = symbol("cudaMemGetInfo");
    int (*new_stream)(void**, unsigned) = symbol("cudaStreamCreateWithFlags");
    int (*destroy_stream)(void*) = symbol("cudaStreamDestroy");
    int (*synchronize)(void*) = symbol("cudaStreamSynchronize");
    int (*malloc)(void**, std::size_t) = symbol("cudaMalloc");
    int (*free)(void*) = symbol("cudaFree");
    int (*host_alloc)(void**, std::size_t, unsigned) = symbol("cudaHostAlloc");
    int (*free_host)(void*) = symbol("cudaFreeHost");
    int (*memset)(void*, int, std::size_t, void*) = symbol("cudaMemsetAsync");
    int (*copy)(void*, const void*, std::size_t, int, void*) = symbol("cudaMemcpyAsync");
    int (*copy_3d)(const Copy3D*, void*) = symbol("cudaMemcpy3DAsync");
    int (*begin_capture)(void*, int) = symbol("cudaStreamBeginCapture");
    int (*end_capture)(void*, void**) = symbol("cudaStreamEndCapture");
    int (*instantiate)(void**, void*, unsigned long long) = symbol("cudaGraphInstantiateWithFlags");
    int (*destroy_graph)(void*) = symbol("cudaGraphDestroy");
    int (*destroy_launchable)(void*) = symbol("cudaGraphExecDestroy");
    int (*launch)(void*, void*) = symbol("cudaGraphLaunch");
};

/// Throws SessionError if there is none.
const Cudart& cudart() {
    static const Cudart loaded;
    return loaded;
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

void check(const char* call, int error) {
    if (error == 0) return;
    int ours = 0, driver = 0; // 0 without a driver, which is the same error
    if (error == insufficient_driver && cudart().driver_version(&driver) == 0 && driver != 0 && cudart().runtime_version(&ours) == 0)
        throw SessionError("the CUDA runtime here is " + version(ours) + ", this driver is for CUDA " + version(driver) +
                           ": update the driver, or use libraries of its CUDA");
    if (error == insufficient_driver || error == no_device)
        throw SessionError("no NVIDIA GPU with a working driver was found (check with nvidia-smi)");
    cudart().last_error(); // clear it: TensorRT and ONNX Runtime must not see it after a launch of their own
    const std::string name = cudart().error_name(error);
    const std::string what = std::string("CUDA: ") + call + " failed: " + cudart().error_text(error) + " (" + name + ")";
    if (is_lasting(name)) throw DeviceLost(what + lost_advice);
    if (error == out_of_memory) throw MemoryError(what);
    throw DeviceError(what);
}

/// Clear the error: a refused capture must not fail the next call.
Device::Graph refused() {
    cudart().last_error();
    return nullptr;
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

} // namespace

void find_gpu(int number, Here& here) {
    try {
        int count = 0, driver = 0;
        check("cudaGetDeviceCount", cudart().device_count(&count));
        if (number >= count) {
            here.no_gpu = count == 0 ? "no NVIDIA GPU is visible"
                                     : "no GPU " + std::to_string(number) + " is visible: the last of " + std::to_string(count) + " is " +
                                           std::to_string(count - 1) + " (CUDA_VISIBLE_DEVICES, nvidia-smi)";
            return;
        }
        char properties[8192] = {}; // larger than the structure of any version, which begins with the name
        int major = 0, minor = 0;
        check("cudaGetDeviceProperties", cudart().properties(properties, number));
        check("cudaDriverGetVersion", cudart().driver_version(&driver));
        check("cudaDeviceGetAttribute", cudart().attribute(&major, major_capability, number));
        check("cudaDeviceGetAttribute", cudart().attribute(&minor, minor_capability, number));
        here.gpu = "sm" + std::to_string(major) + std::to_string(minor);
        here.gpu_name = properties;
        here.driver = version(driver);
    } catch (const SessionError& error) {
        here.no_gpu = error.what();
    }
}

void Device::Forget::operator()(void* graph) const { cudart().destroy_launchable(graph); }

Device::Current::Current(int wanted) : wanted_(wanted) {
    check("cudaGetDevice", cudart().get_device(&found_));
    if (found_ != wanted_) check("cudaSetDevice", cudart().set_device(wanted_));
}

Device::Current::~Current() {
    if (found_ != wanted_) cudart().set_device(found_);
}

Device::Device(int number, void* stream) : number_(number), owns_stream_(stream == nullptr), stream_(stream) {
    const Current current(number_);
    int is_integrated = 0;
    check("cudaDeviceGetAttribute", cudart().attribute(&is_integrated, integrated, number_));
    is_integrated_ = is_integrated != 0;
    if (!owns_stream_) return;
    // Not ordered with the legacy stream: work of others on that stream would break a capture.
    check("cudaStreamCreateWithFlags", cudart().new_stream(&stream_, not_blocking));
}

Device::~Device() {
    try {
        const Current current(number_);
        cudart().synchronize(stream_);
        for (const Address address : allocated_) cudart().free(pointer(address));
        for (void* memory : pinned_) cudart().free_host(memory);
        if (owns_stream_) cudart().destroy_stream(stream_);
    } catch (const SessionError&) { // the GPU has failed; its memory goes with the process
    }
}

std::optional<std::int64_t> Device::free_memory() const {
    if (is_integrated_) return available_memory();
    const Current current(number_);
    std::size_t free = 0, total = 0;
    check("cudaMemGetInfo", cudart().memory_info(&free, &total));
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
    check("cudaMalloc", cudart().malloc(&memory, std::max(num_bytes, least)));
    allocated_.push_back(reinterpret_cast<Address>(memory));
    zero(allocated_.back(), std::max(num_bytes, least));
    return allocated_.back();
}

unsigned char* Device::pinned(std::size_t num_bytes) {
    void* memory = nullptr;
    check("cudaHostAlloc", cudart().host_alloc(&memory, std::max(num_bytes, least), 0));
    pinned_.push_back(memory);
    return static_cast<unsigned char*>(memory);
}

void Device::release(Address address) {
    allocated_.erase(std::remove(allocated_.begin(), allocated_.end(), address), allocated_.end());
    synchronize();
    check("cudaFree", cudart().free(pointer(address)));
}

void Device::zero(Address address, std::size_t num_bytes) {
    check("cudaMemsetAsync", cudart().memset(pointer(address), 0, num_bytes, stream_));
}

void Device::upload(Address address, const void* data, std::size_t num_bytes) {
    check("cudaMemcpyAsync", cudart().copy(pointer(address), data, num_bytes, to_device, stream_));
}

void Device::download(void* data, Address address, std::size_t num_bytes) {
    check("cudaMemcpyAsync", cudart().copy(data, pointer(address), num_bytes, to_host, stream_));
}

void Device::copy_runs(const Runs& target, const Runs& source, std::size_t width, std::size_t height, std::size_t depth) {
    Copy3D copy{};
    copy.source = {pointer(source.address), source.pitch, source.pitch, source.per_slice};
    copy.target = {pointer(target.address), target.pitch, target.pitch, target.per_slice};
    copy.extent[0] = width, copy.extent[1] = height, copy.extent[2] = depth;
    copy.kind = on_device;
    check("cudaMemcpy3DAsync", cudart().copy_3d(&copy, stream_));
}

void Device::synchronize() { check("cudaStreamSynchronize", cudart().synchronize(stream_)); }

void Device::settle() noexcept {
    if (cudart().synchronize(stream_) != 0) cudart().last_error();
}

Device::Graph Device::capture(const std::function<bool()>& enqueue) {
    if (cudart().begin_capture(stream_, of_this_thread) != 0) return refused();
    const bool done = enqueue();
    void* graph = nullptr;
    // Ends the capture even if it was refused; otherwise the stream is not usable again.
    const int ended = cudart().end_capture(stream_, &graph);
    void* launchable = nullptr;
    const bool good = done && ended == 0 && cudart().instantiate(&launchable, graph, 0) == 0;
    if (graph != nullptr) cudart().destroy_graph(graph);
    return good ? Graph(launchable) : refused();
}

void Device::launch(const Graph& graph) { check("cudaGraphLaunch", cudart().launch(graph.get(), stream_)); }

} // namespace mars
