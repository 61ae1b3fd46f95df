// Growing, and copies of rows: by memcpy on the host, by the graphs of ort_memory on a device.
#include "device/ort_rows.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "headroom.hpp"

namespace mars {

namespace {

/// Of each buffer [kv_heads, length, head_dim], in memory of its own or of somebody else's.
struct HostSaved : Saved {
    using Saved::Saved;
    std::vector<const unsigned char*> buffers;
    std::vector<std::vector<unsigned char>> own;
    std::shared_ptr<const void> owner;
};

/// The same on the device, one behind the other.
struct DeviceSaved : Saved {
    DeviceSaved(std::int64_t num_entries, OrtBlock memory) : Saved(num_entries), block(std::move(memory)) {}
    OrtBlock block;
};

std::size_t size_of(std::int64_t num_bytes) { return static_cast<std::size_t>(num_bytes); }

/// Work on the device, whose errors are ours.
template <typename Work>
void on_device(const char* what, const Work& work) {
    try {
        work();
    } catch (const Ort::Exception& error) {
        const std::string words = std::string("ONNX Runtime could not ") + what + ": " + first_line(error);
        if (is_lasting(error.what())) throw DeviceLost(words + lost_advice);
        throw DeviceError(words);
    }
}

constexpr const char* advice = "shorten the prompt or max_new_tokens, or run fewer rows at once";

} // namespace

void OrtRows::reserve(std::int64_t capacity) {
    if (capacity <= capacity_) return;
    const std::int64_t grown = grown_to(capacity);
    const std::string rows = std::to_string(num_rows_) + " row(s) of " + std::to_string(grown);
    const double product = static_cast<double>(num_rows_) * static_cast<double>(grown) * static_cast<double>(entry_bytes());
    const auto taken = static_cast<std::int64_t>(std::min(product, 1e18));
    if (is_on_host()) Headroom().require({taken, "KV memory of " + rows + " entries", advice});
    std::string why;
    try {
        grow(grown);
        capacity_ = grown;
        return;
    } catch (const Ort::Exception& error) {
        if (is_lasting(error.what())) throw DeviceLost("ONNX Runtime failed where KV rows grew: " + first_line(error) + lost_advice);
        why = " (" + first_line(error) + ")";
    } catch (const std::exception&) { // bad_alloc, or a length no vector can have
    }
    throw MemoryError("not enough memory: the KV entries of " + rows + " take " + std::to_string(taken / 1'000'000) + " MB" + why + "; " +
                      advice + ", or free memory");
}

void HostRows::grow(std::int64_t capacity) {
    const std::int64_t old_head = capacity_ * entry_bytes_, new_head = capacity * entry_bytes_;
    std::vector<std::vector<unsigned char>> fresh;
    for (std::size_t i = 0; i < num_buffers_; ++i) {
        fresh.emplace_back(size_of(num_rows_ * kv_heads_ * new_head));
        for (std::int64_t head = 0; old_head > 0 && head < num_rows_ * kv_heads_; ++head)
            std::memcpy(fresh[i].data() + head * new_head, buffers_[i].data() + head * old_head, size_of(old_head));
    }
    buffers_ = std::move(fresh);
}

void HostRows::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    const std::int64_t pitch = capacity_ * entry_bytes_;
    for (std::size_t i = 0; i < num_buffers_; ++i)
        for (std::int64_t head = 0; head < kv_heads_; ++head)
            std::memcpy(at(i, target) + head * pitch, at(i, source) + head * pitch, size_of(length * entry_bytes_));
}

std::shared_ptr<const Saved> HostRows::save(std::int64_t row, std::int64_t length) {
    auto saved = std::make_shared<HostSaved>(length);
    const std::int64_t run = length * entry_bytes_, pitch = capacity_ * entry_bytes_;
    for (std::size_t i = 0; i < num_buffers_; ++i) {
        std::vector<unsigned char>& copy = saved->own.emplace_back(size_of(kv_heads_ * run));
        saved->buffers.push_back(copy.data());
        for (std::int64_t head = 0; head < kv_heads_; ++head)
            std::memcpy(copy.data() + head * run, at(i, row) + head * pitch, size_of(run));
    }
    return saved;
}

void HostRows::load(std::int64_t row, const Saved& saved, std::int64_t length) {
    const auto& from = dynamic_cast<const HostSaved&>(saved);
    const std::int64_t run = saved.length * entry_bytes_, pitch = capacity_ * entry_bytes_;
    for (std::size_t i = 0; i < num_buffers_; ++i)
        for (std::int64_t head = 0; head < kv_heads_; ++head)
            std::memcpy(at(i, row) + head * pitch, from.buffers[i] + head * run, size_of(length * entry_bytes_));
}

std::shared_ptr<const Saved> HostRows::bring(const HostEntries& entries) {
    auto saved = std::make_shared<HostSaved>(entries.length);
    for (std::size_t i = 0; i < num_buffers_; ++i)
        saved->buffers.push_back(entries.data + static_cast<std::int64_t>(i) * kv_heads_ * entries.length * entry_bytes_);
    saved->owner = entries.owner;
    return saved;
}

DeviceRows::~DeviceRows() { memory_->give_up({num_rows_, capacity_}, std::move(buffers_)); }

std::int64_t DeviceRows::grown_to(std::int64_t capacity) const {
    return memory_->captures() ? doubled(capacity, capacity_) : OrtRows::grown_to(capacity);
}

void DeviceRows::grow(std::int64_t capacity) {
    const std::int64_t heads = num_rows_ * kv_heads_;
    std::vector<OrtBlock> fresh = memory_->allocate_rows(num_buffers_, {num_rows_, capacity}, size_of(heads * capacity * entry_bytes_));
    std::vector<OrtMemory::Pair> pairs;
    OrtBlock zeros;
    if (capacity_ == 0) { // one entry of each head, from which all are filled up
        const std::vector<unsigned char> none(size_of(heads * entry_bytes_));
        zeros = memory_->allocate(none.size());
        memory_->upload(zeros.data(), none.data(), none.size());
    }
    for (std::size_t i = 0; i < num_buffers_; ++i) pairs.emplace_back(capacity_ == 0 ? zeros.data() : buffers_[i].data(), fresh[i].data());
    memory_->pad(pairs, {heads, elements(capacity_ == 0 ? 1 : capacity_)}, {heads, elements(capacity)});
    bound.clear();
    binding.ClearBoundInputs(); // before the memory that it names
    binding.ClearBoundOutputs();
    std::swap(buffers_, fresh);
    memory_->give_up({num_rows_, capacity_}, std::move(fresh));
}

void DeviceRows::move(std::int64_t source, std::int64_t target, std::int64_t length) {
    if (length == 0 || source == target) return;
    // The whole row, which is one run of memory; behind `length` there is nothing that anyone reads.
    std::vector<OrtMemory::Pair> pairs;
    for (std::size_t i = 0; i < num_buffers_; ++i) pairs.emplace_back(at(i, source), at(i, target));
    on_device("move a row", [&] { memory_->copy(pairs, size_of(row_bytes())); });
}

std::shared_ptr<const Saved> DeviceRows::save(std::int64_t row, std::int64_t length) {
    const std::int64_t part = kv_heads_ * length * entry_bytes_;
    std::shared_ptr<DeviceSaved> saved;
    on_device("save a row", [&] {
        saved = std::make_shared<DeviceSaved>(length, memory_->allocate(num_buffers_ * size_of(part)));
        std::vector<OrtMemory::Pair> pairs;
        for (std::size_t i = 0; i < num_buffers_; ++i) pairs.emplace_back(at(i, row), saved->block.data() + i * size_of(part));
        memory_->pad(pairs, {kv_heads_, elements(capacity_)}, {kv_heads_, elements(length)});
    });
    return saved;
}

void DeviceRows::load(std::int64_t row, const Saved& saved, std::int64_t) {
    // All that was saved, and zeros behind it: each run of a row is one run of what was saved.
    const auto& from = dynamic_cast<const DeviceSaved&>(saved);
    const std::int64_t part = kv_heads_ * saved.length * entry_bytes_;
    std::vector<OrtMemory::Pair> pairs;
    for (std::size_t i = 0; i < num_buffers_; ++i) pairs.emplace_back(from.block.data() + i * size_of(part), at(i, row));
    on_device("load a row", [&] { memory_->pad(pairs, {kv_heads_, elements(saved.length)}, {kv_heads_, elements(capacity_)}); });
}

std::shared_ptr<const Saved> DeviceRows::bring(const HostEntries& entries) {
    const std::size_t part = size_of(kv_heads_ * entries.length * entry_bytes_);
    std::shared_ptr<DeviceSaved> saved;
    on_device("bring entries", [&] {
        saved = std::make_shared<DeviceSaved>(entries.length, memory_->allocate(num_buffers_ * part));
        for (std::size_t i = 0; i < num_buffers_; ++i) // one after the other: a copy takes as much again for a while
            memory_->upload(saved->block.data() + i * part, entries.data + i * part, part);
    });
    return saved;
}

std::vector<unsigned char> DeviceRows::fetch(const Saved& saved) const {
    const auto& from = dynamic_cast<const DeviceSaved&>(saved);
    std::vector<unsigned char> entries(num_buffers_ * size_of(kv_heads_ * saved.length * entry_bytes_));
    on_device("fetch entries", [&] { memory_->download(entries.data(), from.block.data(), entries.size()); });
    return entries;
}

unsigned char* DeviceRows::staging(std::size_t num_bytes) {
    if (staging_.size() < num_bytes) staging_ = memory_->staging(num_bytes + num_bytes / 2);
    return staging_.data();
}

std::optional<std::string> misplaced(const std::vector<unsigned char>& first, const std::vector<unsigned char>& then) {
    if (std::all_of(first.begin(), first.end(), [](unsigned char part) { return part == 0; })) return "the graph writes them elsewhere";
    if (first != then) return "the graph reads them elsewhere";
    return std::nullopt;
}

} // namespace mars
