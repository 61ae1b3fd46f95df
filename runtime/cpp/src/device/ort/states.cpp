#include "device/ort/states.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <new>
#include <numeric>

#include <mars/errors.hpp>

namespace mars {

RowBlock allocate(std::int64_t num_bytes) {
    void* address = std::calloc(static_cast<std::size_t>(num_bytes), 1);
    if (address == nullptr) throw std::bad_alloc();
    return {static_cast<unsigned char*>(address), std::free};
}

StateRows::StateRows(const RecurrentInfo& info, std::int64_t num_rows) : lengths(static_cast<std::size_t>(num_rows)) {
    const auto size = [](const std::vector<std::int64_t>& shape) {
        return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    };
    const auto begun = info.shapes(0); // the inputs before the first token, and the state
    const double num_bytes = static_cast<double>(num_rows) * info.state_bytes(max_outputs);
    try {
        if (num_bytes > 1e18) throw std::bad_alloc();
        for (const auto& [suffix, shape] : info.shapes(max_outputs))
            buffers[suffix] = {shape, size(shape), size(begun.at(suffix)), allocate(num_rows * size(shape) * std::int64_t{sizeof(float)})};
    } catch (const std::bad_alloc&) {
        throw MemoryError("not enough memory: the recurrent layers' states of " + std::to_string(num_rows) + " row(s) take " +
                          std::to_string(std::llround(num_bytes / 1e6)) + " MB; run fewer rows at once, or free memory");
    }
}

void StateRows::begin(std::int64_t first, const std::vector<std::int64_t>& kv_length) {
    for (std::size_t i = 0; i < kv_length.size(); ++i) {
        if (kv_length[i] > 0) continue;
        const std::int64_t row = first + static_cast<std::int64_t>(i);
        lengths[static_cast<std::size_t>(row)] = 0;
        for (const auto& [suffix, buffer] : buffers) std::fill_n(buffer.at(row), buffer.begun, 0.0F);
    }
}

void StateRows::move(std::int64_t source, std::int64_t target) {
    lengths[static_cast<std::size_t>(target)] = lengths[static_cast<std::size_t>(source)];
    for (const auto& [suffix, buffer] : buffers) std::copy_n(buffer.at(source), buffer.size, buffer.at(target));
}

} // namespace mars
