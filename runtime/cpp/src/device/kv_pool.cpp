// Strides, and the copies of rows between them.
#include "device/kv_pool.hpp"

#include <mars/errors.hpp>

namespace mars {

std::size_t bytes(std::initializer_list<std::int64_t> sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes)
        if (__builtin_mul_overflow(product, size, &product))
            throw SessionError("the engine's shapes are beyond any memory; build it again");
    return static_cast<std::size_t>(product);
}

std::size_t KvPool::tensor_bytes() const { return bytes({layout.num_rows, layout.kv_heads, layout.capacity, layout.entry_bytes}); }

KvMemory KvPool::take() {
    if (!free_.empty()) {
        KvMemory memory = std::move(free_.back());
        free_.pop_back();
        // What an earlier request left may be infinite, and 0 * infinity is NaN.
        for (const Address address : memory.addresses) device.zero(address, tensor_bytes());
        return memory;
    }
    KvMemory memory;
    memory.kv_heads = bytes({layout.kv_heads});
    memory.entry_bytes = bytes({layout.entry_bytes});
    memory.head_bytes = bytes({layout.capacity, layout.entry_bytes});
    memory.row_bytes = bytes({layout.kv_heads, layout.capacity, layout.entry_bytes});
    try {
        for (std::size_t i = 0; i < layout.num_tensors; ++i) memory.addresses.push_back(device.allocate(tensor_bytes()));
    } catch (const SessionError&) {
        for (const Address address : memory.addresses) device.release(address);
        throw;
    }
    return memory;
}

TrtCache::TrtCache(std::shared_ptr<KvPool> pool) : pool_(std::move(pool)) {
    const std::lock_guard<std::mutex> lock(pool_->lock);
    memory_ = pool_->take();
}

TrtCache::~TrtCache() {
    const std::lock_guard<std::mutex> lock(pool_->lock);
    pool_->give_back(std::move(memory_));
}

void TrtCache::reserve(std::int64_t capacity) {
    if (capacity > this->capacity())
        throw SessionError("a step would write entry " + std::to_string(capacity) + " of a row, this engine holds " +
                           std::to_string(this->capacity()) + "; shorten the prompt, or build with a larger --capacity");
}

void TrtCache::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    const std::lock_guard<std::mutex> lock(pool_->lock);
    const auto row = [&](std::int64_t index) { return static_cast<std::size_t>(index) * memory_.row_bytes; };
    for (const Address address : memory_.addresses)
        pool_->device.copy_rows(address + row(target), memory_.head_bytes, address + row(source), memory_.head_bytes,
                                static_cast<std::size_t>(length) * memory_.entry_bytes, memory_.kv_heads);
}

namespace {

/// Device memory of [tensors, kv_heads, length, head_dim], given back when nobody needs it any more.
struct TrtSaved : Saved {
    TrtSaved(std::shared_ptr<KvPool> from, std::int64_t num_entries, std::size_t num_bytes)
        : Saved(num_entries), pool(std::move(from)), address(pool->device.allocate(num_bytes)) {}
    ~TrtSaved() override {
        const std::lock_guard<std::mutex> lock(pool->lock);
        try {
            pool->device.release(address);
        } catch (const SessionError&) { // the device has failed; its memory goes with it
        }
    }

    const std::shared_ptr<KvPool> pool;
    const Address address;
};

} // namespace

std::shared_ptr<const Saved> TrtCache::save(std::int64_t row, std::int64_t length) {
    const std::size_t run = static_cast<std::size_t>(length) * memory_.entry_bytes, part = memory_.kv_heads * run;
    std::unique_lock<std::mutex> lock(pool_->lock);
    auto saved = std::make_unique<TrtSaved>(pool_, length, memory_.addresses.size() * part);
    try {
        for (std::size_t i = 0; i < memory_.addresses.size(); ++i)
            pool_->device.copy_rows(saved->address + i * part, run, memory_.addresses[i] + static_cast<std::size_t>(row) * memory_.row_bytes,
                                    memory_.head_bytes, run, memory_.kv_heads);
    } catch (...) {
        lock.unlock(); // it is released under the lock
        throw;
    }
    lock.unlock();
    return saved;
}

std::shared_ptr<const Saved> TrtCache::bring(const HostEntries& entries) {
    const std::size_t part = memory_.kv_heads * static_cast<std::size_t>(entries.length) * memory_.entry_bytes;
    const std::size_t num_bytes = memory_.addresses.size() * part;
    std::unique_lock<std::mutex> lock(pool_->lock);
    auto saved = std::make_unique<TrtSaved>(pool_, entries.length, num_bytes);
    try {
        pool_->device.upload(saved->address, entries.data, num_bytes);
        pool_->device.synchronize();
    } catch (...) {
        lock.unlock(); // it is released under the lock
        throw;
    }
    lock.unlock();
    return saved;
}

void TrtCache::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const std::size_t run = static_cast<std::size_t>(length) * memory_.entry_bytes;
    const std::size_t pitch = static_cast<std::size_t>(saved.length) * memory_.entry_bytes;
    const Address address = dynamic_cast<const TrtSaved&>(saved).address;
    const std::lock_guard<std::mutex> lock(pool_->lock);
    for (std::size_t i = 0; i < memory_.addresses.size(); ++i)
        pool_->device.copy_rows(memory_.addresses[i] + static_cast<std::size_t>(row) * memory_.row_bytes, memory_.head_bytes,
                                address + i * memory_.kv_heads * pitch, pitch, run, memory_.kv_heads);
}

} // namespace mars
