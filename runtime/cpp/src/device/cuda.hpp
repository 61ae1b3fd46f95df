// runtime/device/cuda.py: device memory, copies, one stream and captured graphs. Only cuda.cpp calls CUDA, whose library it loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/engines.hpp"

namespace mars {

/// Describe the GPU of that number among the ones that CUDA_VISIBLE_DEVICES lists, or say why there is none.
void find_gpu(int number, Here& here);

/// A device address; never dereference it on the host.
using Address = std::uintptr_t;

/// Runs of bytes `pitch` bytes apart, with `per_slice` pitches from one slice to the next.
struct Runs {
    Address address;
    std::size_t pitch, per_slice;
};

/// A GPU, one stream, and everything ordered on that stream.
///
/// Not thread-safe: the backend holds a lock and a Current. Throws SessionError that names the failing call.
class Device {
  public:
    /// Makes the GPU current for the calling thread while this lives. Other threads choose theirs; without this, memory
    /// would come from another GPU, and the stream would refuse work.
    class Current {
      public:
        explicit Current(const Device& device) : Current(device.number_) {}
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        friend class Device;
        explicit Current(int wanted);

        int wanted_, found_ = 0;
    };

    struct Forget {
        void operator()(void* graph) const;
    };
    /// A captured graph that can be launched, or null.
    using Graph = std::unique_ptr<void, Forget>;

    /// `stream`: a cudaStream_t of the caller that outlives this; nullptr: create one.
    explicit Device(int number = 0, void* stream = nullptr);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    /// Free bytes; the system's if the GPU shares its memory, as on a Jetson. No value if unknown.
    std::optional<std::int64_t> free_memory() const;

    /// Throws MemoryError if the GPU shares the system's memory and less is free: the kernel would kill the process.
    void require(std::size_t num_bytes) const;

    /// Zeroed device memory, because masked entries still enter the product 0 * value, and 0 * NaN is NaN.
    Address allocate(std::size_t num_bytes);

    /// Free memory of `allocate`; anything left is freed with the device.
    void release(Address address);

    /// Page-locked host memory, which copies need no staging for; freed with the device.
    unsigned char* pinned(std::size_t num_bytes);

    void zero(Address address, std::size_t num_bytes);

    /// Copy from the host; `data` may be reused after `synchronize`.
    void upload(Address address, const void* data, std::size_t num_bytes);

    /// Copy to the host; complete after `synchronize`.
    void download(void* data, Address address, std::size_t num_bytes);

    /// Copy `height` runs of `width` bytes in each of `depth` slices on the device, in one call. Source and target must
    /// not overlap.
    void copy_runs(const Runs& target, const Runs& source, std::size_t width, std::size_t height, std::size_t depth);

    void synchronize();

    /// Wait for the stream after an error, which is the one that is reported.
    void settle() noexcept;

    /// Capture what `enqueue` puts on the stream as a graph, without running it; null if it cannot be captured.
    Graph capture(const std::function<bool()>& enqueue);

    void launch(const Graph& graph);
    int number() const { return number_; }
    void* stream() const { return stream_; }

  private:
    const int number_;
    const bool owns_stream_;
    bool is_integrated_ = false;
    void* stream_;
    std::vector<Address> allocated_;
    std::vector<void*> pinned_;
};

} // namespace mars
