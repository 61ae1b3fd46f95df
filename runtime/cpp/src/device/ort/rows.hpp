// runtime/device/kv.py: KV rows in host memory, and their binding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decode/backend.hpp"
#include "device/ort/api.hpp"
#include "device/ort/states.hpp"

namespace mars {

/// One [rows, kv_heads, capacity, head_dim] array for each layer's keys and values.
class OrtRows : public Cache {
  public:
    OrtRows(Ort::Session& session, std::size_t num_buffers, std::int64_t num_rows, std::int64_t kv_heads, std::int64_t entry_bytes,
            const std::optional<RecurrentInfo>& recurrent)
        : binding(session), num_buffers_(num_buffers), num_rows_(num_rows), kv_heads_(kv_heads), entry_bytes_(entry_bytes) {
        if (recurrent) states.emplace(*recurrent, num_rows);
    }

    std::int64_t capacity() const override { return capacity_; }
    std::int64_t entry_bytes() const override { return static_cast<std::int64_t>(num_buffers_) * kv_heads_ * entry_bytes_; }

    /// If memory runs out, the rows are unchanged.
    void reserve(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override;

    void shrink(std::int64_t capacity, const std::vector<std::int64_t>& lengths) override { resize(bucket(capacity, 0), lengths); }
    void release(std::int64_t row) override;
    void move(std::int64_t source, std::int64_t target, std::int64_t length) override;
    std::optional<std::int64_t> copy_bytes(std::int64_t row, std::int64_t length) const override;
    std::shared_ptr<const Saved> save(std::int64_t row, std::int64_t length) override;
    void load(std::int64_t row, const Saved& saved, std::int64_t length) override;

    /// Memory of buffer `i` from row `first` on.
    unsigned char* at(std::size_t i, std::int64_t first) const { return buffers_[i].get() + first * row_bytes(); }

    std::int64_t row_bytes() const { return kv_heads_ * pitch(); }

    std::optional<StateRows> states; // no value without recurrent layers
    Ort::IoBinding binding;
    std::vector<std::int64_t> bound; // what is bound: {first row, rows, capacity, logits wanted, likeliest tokens wanted}

  private:
    std::int64_t pitch() const { return capacity_ * entry_bytes_; }

    /// Move the first `lengths[i]` entries of row i to zeroed buffers of `capacity` entries a row. Host memory that is never written
    /// takes no space, so rows that are not used cost nothing.
    void resize(std::int64_t capacity, const std::vector<std::int64_t>& lengths);
    void widen(std::int64_t capacity, const std::vector<std::int64_t>& lengths);

    const std::size_t num_buffers_;
    const std::int64_t num_rows_, kv_heads_, entry_bytes_;
    std::int64_t capacity_ = 0;
    std::vector<RowBlock> buffers_;
};

} // namespace mars
