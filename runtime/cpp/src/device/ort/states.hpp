// runtime/device/states.py: what recurrent layers keep of rows, in host memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"

namespace mars {

/// Zeroed bytes, because masked entries still enter the product 0 * value, and 0 * NaN is NaN.
using RowBlock = std::shared_ptr<unsigned char>;

/// Throws std::bad_alloc.
RowBlock allocate(std::int64_t num_bytes);

/// A copy of a row's states, which have `length` tokens.
struct SavedStates {
    std::map<std::string, std::vector<float>> parts; // by name suffix
    std::int64_t length = 0;
};

/// The states and inputs that recurrent layers keep for some rows.
class StateRows {
  public:
    static constexpr std::int64_t max_outputs = 64; // of a step: inputs of that many tokens are kept

    /// One float32 [rows, ...] array. `size`: numbers of a row; `begun`: those that a new text reads before they are written.
    struct Buffer {
        std::vector<std::int64_t> shape; // of a row
        std::int64_t size, begun;
        RowBlock block;

        float* at(std::int64_t row) const { return reinterpret_cast<float*>(block.get()) + row * size; }
    };

    /// Throws MemoryError.
    StateRows(const RecurrentInfo& info, std::int64_t num_rows);

    /// The lengths of rows first, first + 1, ... before a step with these cursors. A row at 0 begins a text. Until `lengths` is set after the
    /// step, nothing of the rows can be copied.
    std::vector<std::int64_t> begin(std::int64_t first, const std::vector<std::int64_t>& kv_length);
    void move(std::int64_t source, std::int64_t target);

    /// Size of what `save` returns; no value if the states have more than `length` tokens.
    std::optional<std::int64_t> copy_bytes(std::int64_t row, std::int64_t length) const;

    /// Copies of a row's states, and of the inputs with which a step brings them to `length`.
    SavedStates save(std::int64_t row, std::int64_t length) const;
    void load(std::int64_t row, const SavedStates& saved);

    std::map<std::string, Buffer> buffers; // by name suffix
    std::vector<std::int64_t> lengths;     // the tokens that each row's states have

  private:
    const RecurrentInfo info_;
};

} // namespace mars
