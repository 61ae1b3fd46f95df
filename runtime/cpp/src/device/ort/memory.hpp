// Memory of KV rows: the host's, or a GPU's by the CUDA runtime that ONNX Runtime's provider has loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace mars {

/// The first of some runs of bytes, and how far apart they begin.
struct RowRuns {
    unsigned char* address; ///< may be one of a GPU: not to be read
    std::int64_t pitch;
};

/// Where KV rows are allocated and copied. Any thread may use it.
class RowMemory {
  public:
    virtual ~RowMemory() = default;

    /// ONNX Runtime's name of this memory, and the device's number.
    virtual const char* name() const = 0;
    virtual int index() const { return 0; }

    /// Zeroed bytes: an entry that is masked out still enters the product 0 * value, and 0 * NaN is NaN. Throws std::bad_alloc.
    virtual unsigned char* allocate(std::size_t num_bytes) = 0;
    virtual void release(unsigned char* address) noexcept = 0;

    /// Copy `count` runs of `width` bytes; complete when it returns. Throws DeviceError.
    virtual void copy(const RowRuns& target, const RowRuns& source, std::int64_t width, std::int64_t count) = 0;

    /// Bytes that are free now; nothing where unknown.
    virtual std::optional<std::int64_t> available() const = 0;
};

std::shared_ptr<RowMemory> host_memory();

/// Throws SessionError where the process has no CUDA runtime: load a session of the CUDA provider first.
std::shared_ptr<RowMemory> cuda_memory(int gpu);

} // namespace mars
