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
#include "device/cuda.hpp"

namespace mars {

/// The product of sizes from a manifest. Throws SessionError on overflow.
std::size_t bytes(std::initializer_list<std::int64_t> sizes);

/// Tensors of [rows, kv_heads, capacity, head_dim]; an entry has `entry_bytes` in each head. A graph with entries first has
/// one head, which is all heads of the model in turn. `capacity_for` chooses the capacity of a row with that many entries.
struct KvLayout {
    std::size_t num_tensors = 0;
    std::int64_t kv_heads = 0, entry_bytes = 0;
    std::function<std::int64_t(std::int64_t)> capacity_for;
};

constexpr std::size_t alignment = 256; // bytes: required alignment of tensors

/// Number of pitches for `runs` such that the next tensor is aligned; one copy then reaches all tensors.
std::size_t per_slice(std::size_t runs, std::size_t pitch);

/// These tensors in one block on the device: their addresses, and strides in bytes.
struct KvMemory {
    std::vector<Address> addresses;
    std::size_t row_bytes = 0, head_bytes = 0, entry_bytes = 0, kv_heads = 0;
    std::size_t heads_per_tensor = 0; ///< heads of all rows, and the gap between two tensors
    std::size_t num_bytes = 0;
    std::int64_t num_rows = 0, capacity = 0;

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

    KvPool(int gpu, void* stream) : device(gpu, stream) {}

    Device device;
    KvLayout layout;

    /// Bytes that may be in the pool or newly taken; 0 for twice the largest memory so far.
    std::size_t max_idle = 0;

    /// Called with the address of memory that is freed: steps bound to it must not run again. The caller of `acquire` has
    /// its turn.
    std::function<void(Address)> forget = [](Address) {};

    /// Where memory of that many rows and entries has its parts.
    KvMemory laid_out(std::int64_t num_rows, std::int64_t capacity) const;

    /// Zeroed memory of at least `num_rows` rows and `capacity` entries; reuses returned memory if it fits, so that captured
    /// steps stay valid. The caller has its turn. Throws MemoryError that says how much was needed.
    KvMemory acquire(std::int64_t num_rows, std::int64_t capacity);

    /// Return memory to the pool. The caller has its turn.
    void release(KvMemory memory) { idle_.push_back(std::move(memory)); }

  private:
    Address allocate(const KvMemory& memory);
    void release_oldest();

    std::mutex mutex_;
    std::vector<KvMemory> idle_; // oldest first
    std::size_t largest_ = 0;    // bytes of the largest memory so far
};

/// KV rows on the device. Memory is taken from the pool at first use and returned by the destructor, so that a batch
/// created before its predecessor is destroyed does not take memory twice.
class GpuCache : public Cache {
  public:
    GpuCache(std::shared_ptr<KvPool> pool, std::int64_t num_rows);
    ~GpuCache() override;
    GpuCache(const GpuCache&) = delete;
    GpuCache& operator=(const GpuCache&) = delete;

    std::int64_t capacity() const override { return memory_ ? memory_->capacity : 0; }
    void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override;
    void shrink(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override;
    void release(std::int64_t row) override;
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
    /// Take memory of another capacity, with the first `lengths[i]` entries of row i.
    void take(std::int64_t capacity, const std::vector<std::int64_t>& lengths);

    std::shared_ptr<KvPool> pool_;
    std::int64_t num_rows_;
    std::optional<KvMemory> memory_;
};

} // namespace mars
