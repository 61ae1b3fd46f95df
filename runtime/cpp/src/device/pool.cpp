#include "device/pool.hpp"

#include <algorithm>
#include <numeric>

#include <mars/errors.hpp>

namespace mars {

std::size_t bytes(std::initializer_list<std::int64_t> sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes)
        if (__builtin_mul_overflow(product, size, &product))
            throw SessionError("the shapes of a step are beyond any memory; export or build again");
    return static_cast<std::size_t>(product);
}

std::size_t per_slice(std::size_t runs, std::size_t pitch) {
    const std::size_t whole = alignment / std::gcd(alignment, pitch);
    return (runs + whole - 1) / whole * whole;
}

KvMemory KvPool::laid_out(std::int64_t num_rows, std::int64_t capacity) const {
    KvMemory memory;
    memory.num_rows = num_rows;
    memory.capacity = capacity;
    memory.kv_heads = bytes({layout.kv_heads});
    memory.entry_bytes = bytes({layout.entry_bytes});
    memory.head_bytes = bytes({capacity, layout.entry_bytes});
    memory.row_bytes = bytes({layout.kv_heads, capacity, layout.entry_bytes});
    memory.heads_per_tensor = per_slice(bytes({num_rows, layout.kv_heads}), memory.head_bytes);
    memory.num_bytes = bytes(
        {static_cast<std::int64_t>(layout.num_tensors), static_cast<std::int64_t>(memory.heads_per_tensor), capacity, layout.entry_bytes});
    return memory;
}

KvMemory KvPool::acquire(std::int64_t num_rows, std::int64_t capacity) {
    auto best = idle_.end();
    for (auto at = idle_.begin(); at != idle_.end(); ++at)
        if (at->num_rows >= num_rows && at->capacity >= capacity && (best == idle_.end() || at->num_bytes < best->num_bytes)) best = at;
    if (best != idle_.end()) {
        // An earlier request may have left infinities, and 0 * infinity is NaN. If zeroing fails, the memory stays in
        // the pool.
        device.zero(best->addresses.front(), best->num_bytes);
        KvMemory memory = std::move(*best);
        idle_.erase(best);
        return memory;
    }
    KvMemory memory = laid_out(num_rows, capacity);
    largest_ = std::max(largest_, memory.num_bytes);
    const std::size_t most = max_idle > 0 ? max_idle : 2 * largest_;
    const auto add = [](std::size_t sum, const KvMemory& each) { return sum + each.num_bytes; };
    while (!idle_.empty() && std::accumulate(idle_.begin(), idle_.end(), memory.num_bytes, add) > most) release_oldest();
    const Address first = allocate(memory);
    for (std::size_t i = 0; i < layout.num_tensors; ++i)
        memory.addresses.push_back(first + i * memory.heads_per_tensor * memory.head_bytes);
    return memory;
}

/// Allocate; free idle memory if there is not enough.
Address KvPool::allocate(const KvMemory& memory) {
    while (true) {
        try {
            return device.allocate(memory.num_bytes);
        } catch (const MemoryError& error) {
            if (idle_.empty())
                throw MemoryError("not enough memory: the KV entries of " + std::to_string(memory.num_rows) + " row(s) of " +
                                  std::to_string(memory.capacity) + " take " + std::to_string(memory.num_bytes / 1000000) + " MB (" +
                                  error.what() + "); shorten the prompt or max_new_tokens, run fewer rows at once, or free memory");
            release_oldest();
        }
    }
}

void KvPool::release_oldest() {
    const Address address = idle_.front().addresses.front();
    idle_.erase(idle_.begin());
    forget(address);
    device.release(address);
}

GpuCache::GpuCache(std::shared_ptr<KvPool> pool, std::int64_t num_rows) : pool_(std::move(pool)), num_rows_(num_rows) {}

GpuCache::~GpuCache() {
    if (!memory_) return;
    try {
        const KvPool::Turn turn(*pool_);
        pool_->release(std::move(*memory_));
    } catch (const SessionError&) { // the device has failed; its memory goes with it
    }
}

const KvMemory& GpuCache::memory() {
    if (!memory_) take(0, {});
    return *memory_;
}

void GpuCache::reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    if (!memory_ || pool_->layout.capacity_for(capacity) > memory_->capacity) take(capacity, lengths);
}

void GpuCache::shrink(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    if (memory_ && pool_->layout.capacity_for(capacity) < memory_->capacity) take(capacity, lengths);
}

void GpuCache::take(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    const KvPool::Turn turn(*pool_);
    KvMemory fresh = pool_->acquire(num_rows_, pool_->layout.capacity_for(capacity));
    for (std::size_t row = 0; memory_ && row < lengths.size(); ++row) {
        const auto at = static_cast<std::int64_t>(row);
        const std::size_t run = static_cast<std::size_t>(lengths[row]) * fresh.entry_bytes;
        if (run > 0) pool_->device.copy_runs(fresh.runs(at), memory_->runs(at), run, fresh.kv_heads, fresh.addresses.size());
    }
    if (memory_) pool_->release(std::move(*memory_));
    memory_ = std::move(fresh);
}

void GpuCache::release(std::int64_t row) {
    if (!memory_) return;
    try {
        const KvPool::Turn turn(*pool_);
        const std::size_t num_bytes = memory_->row_bytes, first = static_cast<std::size_t>(row) * num_bytes;
        for (const Address address : memory_->addresses) pool_->device.zero(address + first, num_bytes);
    } catch (const SessionError&) { // the device has failed
    }
}

void GpuCache::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    const KvMemory& rows = memory();
    const KvPool::Turn turn(*pool_);
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes;
    pool_->device.copy_runs(rows.runs(target), rows.runs(source), run, rows.kv_heads, rows.addresses.size());
}

namespace {

/// Device memory of [tensors, kv_heads, length, head_dim].
struct GpuSaved : Saved {
    GpuSaved(std::shared_ptr<KvPool> from, std::int64_t num_entries, std::size_t num_bytes)
        : Saved(num_entries), pool(std::move(from)), address(pool->device.allocate(num_bytes)) {}
    ~GpuSaved() override {
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

std::shared_ptr<const Saved> GpuCache::save(std::int64_t row, std::int64_t length) {
    const KvMemory& rows = memory();
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes, part = rows.kv_heads * run;
    std::unique_ptr<GpuSaved> saved; // outlives the turn, because its destructor takes one of its own
    const KvPool::Turn turn(*pool_);
    saved = std::make_unique<GpuSaved>(pool_, length, rows.addresses.size() * part);
    pool_->device.copy_runs({saved->address, run, rows.kv_heads}, rows.runs(row), run, rows.kv_heads, rows.addresses.size());
    return saved;
}

void GpuCache::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const KvMemory& rows = memory();
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes;
    const std::size_t pitch = static_cast<std::size_t>(saved.length) * rows.entry_bytes;
    const Address address = dynamic_cast<const GpuSaved&>(saved).address;
    const KvPool::Turn turn(*pool_);
    pool_->device.copy_runs(rows.runs(row), {address, pitch, rows.kv_heads}, run, rows.kv_heads, rows.addresses.size());
}

} // namespace mars
