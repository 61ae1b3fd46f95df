#include "device/trt/kv_pool.hpp"

#include <numeric>

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

KvMemory KvPool::laid_out(std::int64_t num_rows) const {
    KvMemory memory;
    memory.num_rows = num_rows;
    memory.kv_heads = bytes({layout.kv_heads});
    memory.entry_bytes = bytes({layout.entry_bytes});
    memory.head_bytes = bytes({layout.capacity, layout.entry_bytes});
    memory.row_bytes = bytes({layout.kv_heads, layout.capacity, layout.entry_bytes});
    memory.heads_per_tensor = per_slice(bytes({num_rows, layout.kv_heads}), memory.head_bytes);
    return memory;
}

KvMemory KvPool::acquire(std::int64_t num_rows) {
    const auto num_bytes = [&](const KvMemory& memory) {
        return bytes({static_cast<std::int64_t>(layout.num_tensors), static_cast<std::int64_t>(memory.heads_per_tensor), layout.capacity,
                      layout.entry_bytes});
    };
    auto best = idle_.end();
    for (auto at = idle_.begin(); at != idle_.end(); ++at)
        if (at->num_rows >= num_rows && (best == idle_.end() || at->num_rows < best->num_rows)) best = at;
    if (best != idle_.end()) {
        // An earlier request may have left infinities, and 0 * infinity is NaN. If zeroing fails, the memory stays in
        // the pool.
        device.zero(best->addresses.front(), num_bytes(*best));
        KvMemory memory = std::move(*best);
        idle_.erase(best);
        return memory;
    }
    KvMemory memory = laid_out(num_rows);
    const auto rows_idle = [&] {
        std::int64_t rows = 0;
        for (const KvMemory& each : idle_) rows += each.num_rows;
        return rows;
    };
    while (!idle_.empty() && rows_idle() + num_rows > layout.max_rows) release_oldest();
    const Address first = allocate(memory, num_bytes(memory));
    for (std::size_t i = 0; i < layout.num_tensors; ++i)
        memory.addresses.push_back(first + i * memory.heads_per_tensor * memory.head_bytes);
    return memory;
}

/// Allocate; free idle memory if there is not enough.
Address KvPool::allocate(const KvMemory& memory, std::size_t num_bytes) {
    while (true) {
        try {
            return device.allocate(num_bytes);
        } catch (const MemoryError& error) {
            if (idle_.empty())
                throw MemoryError("not enough memory: the KV entries of " + std::to_string(memory.num_rows) + " row(s) of " +
                                  std::to_string(layout.capacity) + " take " + std::to_string(num_bytes / 1000000) + " MB (" +
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

TrtCache::TrtCache(std::shared_ptr<KvPool> pool, std::int64_t num_rows) : pool_(std::move(pool)), num_rows_(num_rows) {}

TrtCache::~TrtCache() {
    if (!memory_) return;
    try {
        const KvPool::Turn turn(*pool_);
        pool_->release(std::move(*memory_));
    } catch (const SessionError&) { // the device has failed; its memory goes with it
    }
}

const KvMemory& TrtCache::memory() {
    if (!memory_) {
        const KvPool::Turn turn(*pool_);
        memory_ = pool_->acquire(num_rows_);
    }
    return *memory_;
}

void TrtCache::reserve(std::int64_t capacity, const std::vector<std::int64_t>& /*lengths*/) {
    if (capacity > pool_->layout.capacity)
        throw SessionError("a step would write entry " + std::to_string(capacity) + " of a row, this engine holds " +
                           std::to_string(pool_->layout.capacity) + "; shorten the prompt, or build with a larger --capacity");
    memory();
}

void TrtCache::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    const KvMemory& rows = memory();
    const KvPool::Turn turn(*pool_);
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes;
    pool_->device.copy_runs(rows.runs(target), rows.runs(source), run, rows.kv_heads, rows.addresses.size());
}

namespace {

/// Device memory of [tensors, kv_heads, length, head_dim].
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
    const KvMemory& rows = memory();
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes, part = rows.kv_heads * run;
    std::unique_ptr<TrtSaved> saved; // outlives the turn, because its destructor takes one of its own
    const KvPool::Turn turn(*pool_);
    saved = std::make_unique<TrtSaved>(pool_, length, rows.addresses.size() * part);
    pool_->device.copy_runs({saved->address, run, rows.kv_heads}, rows.runs(row), run, rows.kv_heads, rows.addresses.size());
    return saved;
}

void TrtCache::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const KvMemory& rows = memory();
    const std::size_t run = static_cast<std::size_t>(length) * rows.entry_bytes;
    const std::size_t pitch = static_cast<std::size_t>(saved.length) * rows.entry_bytes;
    const Address address = dynamic_cast<const TrtSaved&>(saved).address;
    const KvPool::Turn turn(*pool_);
    pool_->device.copy_runs(rows.runs(row), {address, pitch, rows.kv_heads}, run, rows.kv_heads, rows.addresses.size());
}

} // namespace mars
