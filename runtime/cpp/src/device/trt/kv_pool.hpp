// runtime/device/pool.py: a pool of KV memory on the device, lent to caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "device/engines.hpp"
#include "device/trt/cuda.hpp"

namespace mars {

/// The product of sizes from a manifest. Throws SessionError on overflow.
std::size_t bytes(std::initializer_list<std::int64_t> sizes);

/// Tensors of [rows, kv_heads, capacity, head_dim]; an entry has `entry_bytes` in each head. `max_rows`: most idle
/// rows.
struct KvLayout {
    std::size_t num_tensors = 0;
    std::int64_t max_rows = 0, kv_heads = 0, capacity = 0, entry_bytes = 0;
};

constexpr std::size_t alignment = 256; // bytes: required alignment of tensors

/// Number of pitches for `runs` such that the next tensor is aligned; one copy then reaches all tensors.
std::size_t per_slice(std::size_t runs, std::size_t pitch);

/// These tensors in one block on the device: their addresses, and strides in bytes.
struct KvMemory {
    std::vector<Address> addresses;
    std::size_t row_bytes = 0, head_bytes = 0, entry_bytes = 0, kv_heads = 0;
    std::size_t heads_per_tensor = 0; ///< heads of all rows, and the gap between two tensors
    std::int64_t num_rows = 0;

    /// A row's heads in every tensor, from an entry on.
    Runs runs(std::int64_t row, std::int64_t entry = 0) const {
        return {addresses.front() + static_cast<std::size_t>(row) * row_bytes + static_cast<std::size_t>(entry) * entry_bytes, head_bytes,
                heads_per_tensor};
    }
};

/// The GPU and its idle KV memory, shared by a backend and its caches.
class KvPool {
  public:
    /// A thread's exclusive use of the device; needed before anything is put on its stream.
    class Turn {
      public:
        explicit Turn(KvPool& pool) : lock_(pool.mutex_), current_(pool.device) {}

      private:
        std::lock_guard<std::mutex> lock_;
        Device::Current current_;
    };

    explicit KvPool(const EngineOptions& options) : device(options.gpu, options.stream) {}

    Device device;
    KvLayout layout;

    /// Called with the address of memory that is freed: steps bound to it must not run again. The caller of `take` has
    /// its turn.
    std::function<void(Address)> forget = [](Address) {};

    /// Zeroed memory of at least `num_rows` rows; reuses returned memory if it fits, so that captured steps stay valid.
    /// The caller has its turn. Throws MemoryError that says how much was needed.
    KvMemory acquire(std::int64_t num_rows);

    /// Return memory to the pool. The caller has its turn.
    void release(KvMemory memory) { idle_.push_back(std::move(memory)); }

  private:
    KvMemory laid_out(std::int64_t num_rows) const;
    Address allocate(const KvMemory& memory, std::size_t num_bytes);
    void release_oldest();

    std::mutex mutex_;
    std::vector<KvMemory> idle_; // oldest first
};

/// KV rows on the device. Memory is taken from the pool at first use and returned by the destructor, so that a batch
/// created before its predecessor is destroyed does not take memory twice.
class TrtCache : public Cache {
  public:
    TrtCache(std::shared_ptr<KvPool> pool, std::int64_t num_rows);
    ~TrtCache() override;
    TrtCache(const TrtCache&) = delete;
    TrtCache& operator=(const TrtCache&) = delete;

    std::int64_t capacity() const override { return memory_ ? pool_->layout.capacity : 0; }
    void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override;
    void move(std::int64_t source, std::int64_t target, std::int64_t length) override;

    std::int64_t entry_bytes() const override {
        const KvLayout& layout = pool_->layout;
        return static_cast<std::int64_t>(layout.num_tensors) * layout.kv_heads * layout.entry_bytes;
    }

    std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) override;
    void load(std::int64_t row, const Saved& saved, std::int64_t length) override;

    /// Throws MemoryError if the device has not enough memory.
    const KvMemory& memory();

  private:
    std::shared_ptr<KvPool> pool_;
    std::int64_t num_rows_;
    std::optional<KvMemory> memory_;
};

} // namespace mars
