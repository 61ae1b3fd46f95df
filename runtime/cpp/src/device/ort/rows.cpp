#include "device/ort/rows.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::int64_t large = std::int64_t{16} << 20; // bytes: querying the free memory takes as long as a small step
constexpr const char* advice = "shorten the prompt or max_new_tokens, run fewer rows at once, or free memory";

/// [kv_heads, length, head_dim] of each buffer, one after the other.
struct OrtSaved : Saved {
    OrtSaved(std::int64_t num_entries, RowBlock memory) : Saved(num_entries), block(std::move(memory)) {}
    const RowBlock block;
};

RowBlock allocate(const std::shared_ptr<RowMemory>& memory, std::int64_t num_bytes) {
    return {memory->allocate(static_cast<std::size_t>(num_bytes)), [memory](unsigned char* address) { memory->release(address); }};
}

} // namespace

void OrtRows::reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    if (capacity > capacity_) resize(bucket(capacity, capacity_), lengths);
}

void OrtRows::release(std::int64_t row) {
    for (std::size_t i = 0; i < buffers_.size(); ++i) memory_->discard(at(i, row), row_bytes());
}

void OrtRows::resize(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    const std::int64_t num_rows = memory_->is_host() ? std::max<std::int64_t>(1, static_cast<std::int64_t>(lengths.size())) : num_rows_;
    const double product = static_cast<double>(num_rows) * static_cast<double>(capacity) * static_cast<double>(entry_bytes());
    const auto num_bytes = static_cast<std::int64_t>(std::min(product, 1e18));
    const auto free = num_bytes < large ? std::nullopt : memory_->available();
    try {
        if (free && num_bytes > *free) throw std::bad_alloc();
        widen(capacity, lengths);
        capacity_ = capacity;
    } catch (const std::bad_alloc&) {
        throw MemoryError("not enough memory: the KV entries of " + std::to_string(num_rows) + " row(s) of " + std::to_string(capacity) +
                          " take " + std::to_string(num_bytes / 1'000'000) + " MB" +
                          (free ? ", " + std::to_string(*free / 1'000'000) + " MB are free" : "") + "; " + advice);
    }
}

void OrtRows::widen(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    const std::int64_t fresh_pitch = capacity * entry_bytes_;
    std::vector<RowBlock> fresh;
    for (std::size_t i = 0; i < num_buffers_; ++i) {
        fresh.push_back(allocate(memory_, num_rows_ * kv_heads_ * fresh_pitch));
        for (std::size_t row = 0; row < lengths.size(); ++row) {
            unsigned char* const target = fresh[i].get() + static_cast<std::int64_t>(row) * kv_heads_ * fresh_pitch;
            if (lengths[row] > 0)
                memory_->copy({target, fresh_pitch}, {at(i, static_cast<std::int64_t>(row)), pitch()}, lengths[row] * entry_bytes_,
                              kv_heads_);
        }
    }
    bound.clear();
    binding.ClearBoundInputs(); // before freeing the memory they refer to
    binding.ClearBoundOutputs();
    buffers_ = std::move(fresh);
}

void OrtRows::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    for (std::size_t i = 0; i < num_buffers_; ++i)
        memory_->copy({at(i, target), pitch()}, {at(i, source), pitch()}, length * entry_bytes_, kv_heads_);
}

std::shared_ptr<const Saved> OrtRows::save(std::int64_t row, std::int64_t length) {
    const std::int64_t run = length * entry_bytes_, part = kv_heads_ * run;
    auto saved = std::make_shared<OrtSaved>(length, allocate(memory_, static_cast<std::int64_t>(num_buffers_) * part));
    for (std::size_t i = 0; i < num_buffers_; ++i)
        memory_->copy({saved->block.get() + static_cast<std::int64_t>(i) * part, run}, {at(i, row), pitch()}, run, kv_heads_);
    return saved;
}

void OrtRows::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const std::int64_t run = saved.length * entry_bytes_, part = kv_heads_ * run;
    unsigned char* source = dynamic_cast<const OrtSaved&>(saved).block.get();
    for (std::size_t i = 0; i < num_buffers_; ++i)
        memory_->copy({at(i, row), pitch()}, {source + static_cast<std::int64_t>(i) * part, run}, length * entry_bytes_, kv_heads_);
}

} // namespace mars
