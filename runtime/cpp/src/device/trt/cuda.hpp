// Device memory, copies, one stream and captured graphs. Its source is the only one that calls CUDA; it knows no TensorRT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace mars {

/// The GPU that would be used. `capability` such as `sm86`; `driver`: the newest CUDA it supports, such as `12.9`.
struct Gpu {
    std::string name, capability, driver;
};

/// The GPU of that number, of those that CUDA_VISIBLE_DEVICES shows, or one sentence that says why there is none.
std::variant<Gpu, std::string> find_gpu(int number = 0);

/// An address on the device: never to be followed on the host.
using Address = std::uintptr_t;

/// Where runs of bytes lie: `pitch` bytes apart, and `per_slice` pitches from one slice to the next.
struct Runs {
    Address address;
    std::size_t pitch, per_slice;
};

/// A GPU, one stream on it, and everything that is ordered on that stream.
///
/// Nothing here is thread-safe; the backend holds a lock, and a Current. Throws SessionError that names the failing call.
class Device {
  public:
    /// Makes the GPU the calling thread's current one for as long as it lives. Which one is current belongs to a thread, and others in
    /// the process choose theirs: memory would come from that one, and a stream refuses work from there.
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
    /// A captured graph that can be launched; empty where there is none.
    using Graph = std::unique_ptr<void, Forget>;

    /// `stream`: a cudaStream_t of the caller's, which outlives this; nullptr: a new one of that priority.
    explicit Device(int number = 0, void* stream = nullptr, int priority = 0);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    /// Bytes that are free: the system's where the GPU shares its memory, as on a Jetson; nothing where unknown.
    std::optional<std::int64_t> free_memory() const;

    /// Throws MemoryError where the GPU shares the system's memory and less is free: the kernel would end the process instead.
    void require(std::size_t num_bytes) const;

    /// Device memory, zeroed: what is masked out still meets a zero weight, and 0 * NaN is NaN.
    Address allocate(std::size_t num_bytes);

    /// Give back what `allocate` returned; what is left goes with the device.
    void release(Address address);

    /// Page-locked host memory, from which copies need no staging; it goes with the device.
    unsigned char* pinned(std::size_t num_bytes);

    void zero(Address address, std::size_t num_bytes);

    /// Copy from the host; `data` may be reused after `synchronize`.
    void upload(Address address, const void* data, std::size_t num_bytes);

    /// Fill host memory from `address`; it is complete after `synchronize`.
    void download(void* data, Address address, std::size_t num_bytes);

    /// Copy `height` runs of `width` bytes in each of `depth` slices on the device, in one call. What is read and what is written must
    /// not overlap.
    void copy_runs(const Runs& target, const Runs& source, std::size_t width, std::size_t height, std::size_t depth);

    void synchronize();

    /// A graph of what `enqueue` puts on the stream, without running it; empty when it cannot be captured.
    Graph capture(const std::function<bool()>& enqueue);

    void launch(const Graph& graph);

    /// The stream, as a cudaStream_t.
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
