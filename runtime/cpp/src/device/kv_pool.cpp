// Strides, and the copies of rows between them.
#include "device/kv_pool.hpp"

#include <numeric>
#include <optional>

#include <mars/errors.hpp>

namespace mars {

std::size_t bytes(std::initializer_list<std::int64_t> sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes)
        if (__builtin_mul_overflow(product, size, &product))
            throw SessionError("the engine's shapes are beyond any memory; build it again");
    return static_cast<std::size_t>(product);
}

std::size_t per_slice(std::size_t runs, std::size_t pitch) {
    const std::size_t whole = alignment / std::gcd(alignment, pitch);
    return (runs + whole - 1) / whole * whole;
}

KvMemory KvPool::take() {
    KvMemory memory;
    memory.kv_heads = bytes({layout.kv_heads});
    memory.entry_bytes = bytes({layout.entry_bytes});
    memory.head_bytes = bytes({layout.capacity, layout.entry_bytes});
    memory.row_bytes = bytes({layout.kv_heads, layout.capacity, layout.entry_bytes});
    memory.heads_per_tensor = per_slice(bytes({layout.num_rows, layout.kv_heads}), memory.head_bytes);
    const auto tensors = static_cast<std::int64_t>(layout.num_tensors), heads = static_cast<std::int64_t>(memory.heads_per_tensor);
    const std::size_t num_bytes = bytes({tensors, heads, layout.capacity, layout.entry_bytes});
    if (!free_.empty()) {
        memory = std::move(free_.back());
        free_.pop_back();
        // What an earlier request left may be infinite, and 0 * infinity is NaN.
        device.zero(memory.addresses.front(), num_bytes);
        return memory;
    }
    const Address first = device.allocate(num_bytes);
    for (std::size_t i = 0; i < layout.num_tensors; ++i)
        memory.addresses.push_back(first + i * memory.heads_per_tensor * memory.head_bytes);
    return memory;
}

namespace {

/// A run of each head of each tensor, in one call.
void copy(Device& device, const Runs& target, const Runs& source, std::size_t run, const KvMemory& memory) {
    device.copy_runs(target, source, run, memory.kv_heads, memory.addresses.size());
}

} // namespace

TrtCache::TrtCache(std::shared_ptr<KvPool> pool) : pool_(std::move(pool)) {
    const KvPool::Turn turn(*pool_);
    memory_ = pool_->take();
}

TrtCache::~TrtCache() {
    try {
        const KvPool::Turn turn(*pool_);
        pool_->give_back(std::move(memory_));
    } catch (const SessionError&) { // the device has failed; its memory goes with it
    }
}

void TrtCache::reserve(std::int64_t capacity) {
    if (capacity > this->capacity())
        throw SessionError("a step would write entry " + std::to_string(capacity) + " of a row, this engine holds " +
                           std::to_string(this->capacity()) + "; shorten the prompt, or build with a larger --capacity");
}

void TrtCache::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    const KvPool::Turn turn(*pool_);
    copy(pool_->device, memory_.runs(target), memory_.runs(source), static_cast<std::size_t>(length) * memory_.entry_bytes, memory_);
}

namespace {

/// Device memory of [tensors, kv_heads, length, head_dim], given back when nobody needs it any more.
struct TrtSaved : Saved {
    TrtSaved(std::shared_ptr<KvPool> from, std::int64_t num_entries, std::size_t num_bytes)
        : Saved(num_entries), pool(std::move(from)), address(pool->device.allocate(num_bytes)) {}
    ~TrtSaved() override {
        try {
            const KvPool::Turn turn(*pool);
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
    std::optional<KvPool::Turn> turn(std::in_place, *pool_);
    auto saved = std::make_unique<TrtSaved>(pool_, length, memory_.addresses.size() * part);
    try {
        copy(pool_->device, {saved->address, run, memory_.kv_heads}, memory_.runs(row), run, memory_);
    } catch (...) {
        turn.reset(); // it is released in a turn of its own
        throw;
    }
    turn.reset();
    return saved;
}

std::shared_ptr<const Saved> TrtCache::bring(const HostEntries& entries) {
    const std::size_t part = memory_.kv_heads * static_cast<std::size_t>(entries.length) * memory_.entry_bytes;
    const std::size_t num_bytes = memory_.addresses.size() * part;
    std::optional<KvPool::Turn> turn(std::in_place, *pool_);
    auto saved = std::make_unique<TrtSaved>(pool_, entries.length, num_bytes);
    try {
        pool_->device.upload(saved->address, entries.data, num_bytes);
        pool_->device.synchronize();
    } catch (...) {
        turn.reset(); // it is released in a turn of its own
        throw;
    }
    turn.reset();
    return saved;
}

void TrtCache::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const std::size_t run = static_cast<std::size_t>(length) * memory_.entry_bytes;
    const std::size_t pitch = static_cast<std::size_t>(saved.length) * memory_.entry_bytes;
    const Address address = dynamic_cast<const TrtSaved&>(saved).address;
    const KvPool::Turn turn(*pool_);
    copy(pool_->device, memory_.runs(row), {address, pitch, memory_.kv_heads}, run, memory_);
}

} // namespace mars
