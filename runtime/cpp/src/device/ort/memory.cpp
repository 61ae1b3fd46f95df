#include "device/ort/memory.hpp"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <new>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "machine.hpp"

namespace mars {

namespace {

class HostMemory : public RowMemory {
  public:
    const char* name() const override { return "Cpu"; }

    unsigned char* allocate(std::size_t num_bytes) override {
        void* address = std::calloc(num_bytes, 1);
        if (address == nullptr) throw std::bad_alloc();
        return static_cast<unsigned char*>(address);
    }

    void release(unsigned char* address) noexcept override { std::free(address); }

    void discard(unsigned char* address, std::int64_t num_bytes) override {
        const std::int64_t page = ::sysconf(_SC_PAGESIZE), before = -reinterpret_cast<std::intptr_t>(address) & (page - 1);
        const std::int64_t whole = (num_bytes - before) / page * page;
        if (whole > 0) ::madvise(address + before, static_cast<std::size_t>(whole), MADV_DONTNEED);
    }

    bool is_host() const override { return true; }

    void copy(const RowRuns& target, const RowRuns& source, std::int64_t width, std::int64_t count) override {
        for (std::int64_t i = 0; i < count; ++i)
            std::memcpy(target.address + i * target.pitch, source.address + i * source.pitch, static_cast<std::size_t>(width));
    }

    std::optional<std::int64_t> available() const override { return available_memory(); }
};

/// The runtime of CUDA 13 or 12, by dlsym: libmars is compiled without CUDA.
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
        for (const char* file : {"libcudart.so.13", "libcudart.so.12"}) // the one that the provider has loaded
            if (library == nullptr) library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (library == nullptr) throw SessionError("the CUDA provider has loaded no libcudart.so.13 or libcudart.so.12; KV rows need one");
        void* address = dlsym(library, name);
        if (address == nullptr) throw SessionError(std::string("libcudart has no ") + name);
        return {address};
    }

  public:
    int (*get_device)(int*) = symbol("cudaGetDevice");
    int (*set_device)(int) = symbol("cudaSetDevice");
    int (*malloc)(void**, std::size_t) = symbol("cudaMalloc");
    int (*free)(void*) = symbol("cudaFree");
    int (*memset)(void*, int, std::size_t) = symbol("cudaMemset");
    int (*memcpy_2d)(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int) = symbol("cudaMemcpy2D");
    int (*synchronize)() = symbol("cudaDeviceSynchronize");
    int (*memory_info)(std::size_t*, std::size_t*) = symbol("cudaMemGetInfo");
    int (*attribute)(int*, int, int) = symbol("cudaDeviceGetAttribute");
    int (*last_error)() = symbol("cudaGetLastError");
    const char* (*error_name)(int) = symbol("cudaGetErrorName");
};

class CudaMemory : public RowMemory {
  public:
    explicit CudaMemory(int gpu) : gpu_(gpu) {
        int is_integrated = 0;
        check("cudaDeviceGetAttribute", cudart_.attribute(&is_integrated, integrated, gpu_));
        is_integrated_ = is_integrated != 0;
    }

    const char* name() const override { return "Cuda"; }
    int index() const override { return gpu_; }

    unsigned char* allocate(std::size_t num_bytes) override {
        const Current current(*this);
        void* address = nullptr;
        if (cudart_.malloc(&address, num_bytes) != 0) {
            cudart_.last_error();
            throw std::bad_alloc();
        }
        if (const int error = cudart_.memset(address, 0, num_bytes); error != 0) {
            cudart_.free(address);
            check("cudaMemset", error);
        }
        check("cudaDeviceSynchronize", cudart_.synchronize()); // ONNX Runtime's stream does not wait for this one
        return static_cast<unsigned char*>(address);
    }

    void release(unsigned char* address) noexcept override { cudart_.free(address); }

    void copy(const RowRuns& target, const RowRuns& source, std::int64_t width, std::int64_t count) override {
        const Current current(*this);
        const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
        check("cudaMemcpy2D", cudart_.memcpy_2d(target.address, size(target.pitch), source.address, size(source.pitch), size(width),
                                                size(count), device_to_device));
        check("cudaDeviceSynchronize", cudart_.synchronize());
    }

    std::optional<std::int64_t> available() const override {
        if (is_integrated_) return available_memory(); // the GPU shares the system's memory
        const Current current(*this);
        std::size_t free = 0, total = 0;
        if (cudart_.memory_info(&free, &total) != 0) return std::nullopt;
        return static_cast<std::int64_t>(free);
    }

  private:
    static constexpr int integrated = 18, device_to_device = 3; // cudaDevAttrIntegrated, cudaMemcpyDeviceToDevice

    /// Makes the GPU current for the calling thread while this lives.
    class Current {
      public:
        explicit Current(const CudaMemory& memory) : cudart_(memory.cudart_) {
            memory.check("cudaGetDevice", cudart_.get_device(&before_));
            memory.check("cudaSetDevice", cudart_.set_device(memory.gpu_));
        }
        ~Current() { cudart_.set_device(before_); }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        const Cudart& cudart_;
        int before_ = 0;
    };

    void check(const char* call, int error) const {
        if (error == 0) return;
        cudart_.last_error(); // clear it: ONNX Runtime must not see it
        const std::string name = cudart_.error_name(error), what = std::string("CUDA: ") + call + " failed: " + name;
        if (is_lasting(name)) throw DeviceLost(what + lost_advice);
        throw DeviceError(what);
    }

    const int gpu_;
    Cudart cudart_;
    bool is_integrated_ = false;
};

} // namespace

std::shared_ptr<RowMemory> host_memory() { return std::make_shared<HostMemory>(); }

std::shared_ptr<RowMemory> cuda_memory(int gpu) { return std::make_shared<CudaMemory>(gpu); }

} // namespace mars
