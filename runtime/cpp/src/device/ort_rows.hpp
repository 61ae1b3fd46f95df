// KV rows of an ONNX Runtime session, in host memory or on its device, and what a session has bound of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/ort_api.hpp"
#include "device/ort_memory.hpp"

namespace mars {

/// One [rows, kv_heads, capacity, head_dim] array for each layer's keys and values.
class OrtRows : public Cache {
  public:
    OrtRows(Ort::Session& session, std::size_t num_buffers, std::int64_t num_rows, std::int64_t kv_heads, std::int64_t entry_bytes)
        : binding(session), num_buffers_(num_buffers), num_rows_(num_rows), kv_heads_(kv_heads), entry_bytes_(entry_bytes) {}

    std::int64_t capacity() const override { return capacity_; }
    std::int64_t entry_bytes() const override { return static_cast<std::int64_t>(num_buffers_) * kv_heads_ * entry_bytes_; }

    /// All or nothing: without memory the rows stay as they were.
    void reserve(std::int64_t capacity) override;

    /// Memory of buffer `i` from row `first` on.
    unsigned char* at(std::size_t i, std::int64_t first) const { return buffer(i) + first * row_bytes(); }

    std::int64_t row_bytes() const { return kv_heads_ * capacity_ * entry_bytes_; }

    void interrupt() override {
        is_interrupted = true;
        options.SetTerminate();
    }

    std::atomic<bool> is_interrupted{false};
    Ort::RunOptions options; // of every run on these rows
    Ort::IoBinding binding;
    std::vector<std::int64_t> bound; // what the KV bindings stand for: {first row, rows, capacity, logits wanted, likeliest tokens wanted}

  protected:
    virtual unsigned char* buffer(std::size_t i) const = 0;
    virtual bool is_on_host() const = 0;

    /// The capacity that rows get which need this one.
    virtual std::int64_t grown_to(std::int64_t capacity) const { return bucket(capacity, capacity_); }

    /// Zeroed memory for `capacity` entries a row in place of the present one, with what is there. Zeros, not garbage: an entry that is
    /// masked out still enters the product 0 * value, and 0 * NaN is NaN.
    virtual void grow(std::int64_t capacity) = 0;

    const std::size_t num_buffers_;
    const std::int64_t num_rows_, kv_heads_, entry_bytes_;
    std::int64_t capacity_ = 0;
};

/// In host memory.
class HostRows : public OrtRows {
  public:
    using OrtRows::OrtRows;
    void move(std::int64_t source, std::int64_t target, std::int64_t length) override;
    std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) override;
    void load(std::int64_t row, const Saved& saved, std::int64_t length) override;
    std::shared_ptr<const Saved> bring(const HostEntries& entries) override;

  private:
    unsigned char* buffer(std::size_t i) const override { return const_cast<unsigned char*>(buffers_[i].data()); }
    bool is_on_host() const override { return true; }
    void grow(std::int64_t capacity) override;

    std::vector<std::vector<unsigned char>> buffers_;
};

/// In the memory of the device: entries are copied there and never cross, but for those that are brought.
class DeviceRows : public OrtRows {
  public:
    DeviceRows(std::shared_ptr<OrtMemory> memory, Ort::Session& session, std::size_t num_buffers, std::int64_t num_rows,
               std::int64_t kv_heads, std::int64_t entry_bytes)
        : OrtRows(session, num_buffers, num_rows, kv_heads, entry_bytes), memory_(std::move(memory)) {}
    ~DeviceRows() override;
    DeviceRows(const DeviceRows&) = delete;
    DeviceRows& operator=(const DeviceRows&) = delete;

    void move(std::int64_t source, std::int64_t target, std::int64_t length) override;
    std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) override;
    void load(std::int64_t row, const Saved& saved, std::int64_t length) override;
    std::shared_ptr<const Saved> bring(const HostEntries& entries) override;

    /// What was saved, as host entries are laid out.
    std::vector<unsigned char> fetch(const Saved& saved) const;

    /// Host memory of at least so many bytes for a step's inputs and results; what it holds is not known.
    unsigned char* staging(std::size_t num_bytes);

    OrtMemory& memory() const { return *memory_; }

  private:
    unsigned char* buffer(std::size_t i) const override { return buffers_[i].data(); }
    bool is_on_host() const override { return false; }
    std::int64_t grown_to(std::int64_t capacity) const override;
    void grow(std::int64_t capacity) override;
    std::int64_t elements(std::int64_t entries) const { return entries * entry_bytes_ / memory_->element_bytes(); }

    const std::shared_ptr<OrtMemory> memory_;
    std::vector<OrtBlock> buffers_;
    OrtBlock staging_;
};

/// What is wrong with rows of which a step wrote the first entry, and another one the second: `first` and `then` are the first entry after
/// either. Nothing where a step reads and writes what is bound.
std::optional<std::string> misplaced(const std::vector<unsigned char>& first, const std::vector<unsigned char>& then);

} // namespace mars
