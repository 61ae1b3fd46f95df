// runtime/device/states.py: what recurrent layers keep of rows, in host memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"

namespace mars {

/// Zeroed bytes, because masked entries still enter the product 0 * value, and 0 * NaN is NaN.
using RowBlock = std::shared_ptr<unsigned char>;

/// Throws std::bad_alloc.
RowBlock allocate(std::int64_t num_bytes);

/// What recurrent layers keep of some rows.
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

    /// Prepare rows first, first + 1, ... for a step with these cursors. A row at 0 begins a text.
    void begin(std::int64_t first, const std::vector<std::int64_t>& kv_length);
    void move(std::int64_t source, std::int64_t target);

    std::map<std::string, Buffer> buffers; // by name suffix
    std::vector<std::int64_t> lengths;     // the tokens that each row's states have
};

} // namespace mars
