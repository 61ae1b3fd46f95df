#include "device/ort/rows.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <mars/errors.hpp>

#include "machine.hpp"

namespace mars {

namespace {

constexpr std::int64_t large = std::int64_t{16} << 20; // bytes: querying the free memory takes as long as a small step
constexpr const char* advice = "shorten the prompt or max_new_tokens, run fewer rows at once, or free memory";

/// [kv_heads, length, head_dim] of each buffer, one after the other.
struct OrtSaved : Saved {
    OrtSaved(std::int64_t num_entries, RowBlock memory) : Saved(num_entries), block(std::move(memory)) {}
    const RowBlock block;
    SavedStates states; // empty without recurrent layers
};

/// Copy `count` runs of `width` bytes, `to` and `from` bytes apart.
void copy(unsigned char* target, std::int64_t to, const unsigned char* source, std::int64_t from, std::int64_t width, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(target + i * to, source + i * from, static_cast<std::size_t>(width));
}

} // namespace

void OrtRows::reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    if (capacity > capacity_) resize(bucket(capacity, capacity_), lengths);
}

void OrtRows::release(std::int64_t row) {
    const std::int64_t page = ::sysconf(_SC_PAGESIZE);
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
        unsigned char *const start = at(i, row), *const end = start + row_bytes();
        const std::int64_t before = -reinterpret_cast<std::intptr_t>(start) & (page - 1);
        const std::int64_t whole = std::max<std::int64_t>(0, row_bytes() - before) / page * page;
        unsigned char* const first = whole > 0 ? start + before : end;
        if (whole > 0) ::madvise(first, static_cast<std::size_t>(whole), MADV_DONTNEED); // pages are zero when they are next used
        std::fill(start, first, 0);
        std::fill(first + whole, end, 0);
    }
}

void OrtRows::resize(std::int64_t capacity, const std::vector<std::int64_t>& lengths) {
    const std::int64_t num_rows = std::max<std::int64_t>(1, static_cast<std::int64_t>(lengths.size()));
    const double product = static_cast<double>(num_rows) * static_cast<double>(capacity) * static_cast<double>(entry_bytes());
    const auto num_bytes = static_cast<std::int64_t>(std::min(product, 1e18));
    std::optional<std::int64_t> free;
    if (num_bytes >= large) free = available_memory();
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
        fresh.push_back(allocate(num_rows_ * kv_heads_ * fresh_pitch));
        for (std::size_t row = 0; row < lengths.size(); ++row) {
            unsigned char* const target = fresh[i].get() + static_cast<std::int64_t>(row) * kv_heads_ * fresh_pitch;
            if (lengths[row] > 0)
                copy(target, fresh_pitch, at(i, static_cast<std::int64_t>(row)), pitch(), lengths[row] * entry_bytes_, kv_heads_);
        }
    }
    bound.clear();
    binding.ClearBoundInputs(); // before freeing the memory they refer to
    binding.ClearBoundOutputs();
    buffers_ = std::move(fresh);
}

void OrtRows::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    if (states) states->move(source, target);
    for (std::size_t i = 0; i < num_buffers_; ++i) copy(at(i, target), pitch(), at(i, source), pitch(), length * entry_bytes_, kv_heads_);
}

std::optional<std::int64_t> OrtRows::copy_bytes(std::int64_t row, std::int64_t length) const {
    const auto of_states = states ? states->copy_bytes(row, length) : std::optional<std::int64_t>(0);
    return of_states ? std::optional(*of_states + length * entry_bytes()) : std::nullopt;
}

std::shared_ptr<const Saved> OrtRows::save(std::int64_t row, std::int64_t length) {
    const std::int64_t run = length * entry_bytes_, part = kv_heads_ * run;
    auto saved = std::make_shared<OrtSaved>(length, allocate(static_cast<std::int64_t>(num_buffers_) * part));
    for (std::size_t i = 0; i < num_buffers_; ++i)
        copy(saved->block.get() + static_cast<std::int64_t>(i) * part, run, at(i, row), pitch(), run, kv_heads_);
    if (states) saved->states = states->save(row, length);
    return saved;
}

void OrtRows::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const std::int64_t run = saved.length * entry_bytes_, part = kv_heads_ * run;
    const auto& own = dynamic_cast<const OrtSaved&>(saved);
    const unsigned char* const source = own.block.get();
    for (std::size_t i = 0; i < num_buffers_; ++i)
        copy(at(i, row), pitch(), source + static_cast<std::int64_t>(i) * part, run, length * entry_bytes_, kv_heads_);
    if (states) states->load(row, own.states);
}

} // namespace mars
