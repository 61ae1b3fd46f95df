// runtime/device/memory.py: memory for KV rows: the host's, or a GPU's through the provider's CUDA runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace mars {

/// Runs of bytes: the first one, and the distance between two.
struct RowRuns {
    unsigned char* address; ///< may be a GPU address; never dereference it
    std::int64_t pitch;
};

/// Allocates and copies KV rows. Thread-safe.
class RowMemory {
  public:
    virtual ~RowMemory() = default;

    /// ONNX Runtime's name of this memory, and the device's number.
    virtual const char* name() const = 0;
    virtual int index() const { return 0; }

    /// Zeroed bytes, because masked entries still enter the product 0 * value, and 0 * NaN is NaN. Throws
    /// std::bad_alloc.
    virtual unsigned char* allocate(std::size_t num_bytes) = 0;
    virtual void release(unsigned char* address) noexcept = 0;

    /// Return whole pages of allocated bytes to the system, where it can; they are zero when they are next used.
    virtual void discard(unsigned char* /*address*/, std::int64_t /*num_bytes*/) {}

    /// Whether memory that is never written takes no space.
    virtual bool is_host() const { return false; }

    /// Copy `count` runs of `width` bytes; complete on return. Throws DeviceError.
    virtual void copy(const RowRuns& target, const RowRuns& source, std::int64_t width, std::int64_t count) = 0;

    /// Bytes that are free now; no value if unknown.
    virtual std::optional<std::int64_t> available() const = 0;
};

std::shared_ptr<RowMemory> host_memory();

/// Throws SessionError if the process has no CUDA runtime; load a session of the CUDA provider first.
std::shared_ptr<RowMemory> cuda_memory(int gpu);

} // namespace mars
