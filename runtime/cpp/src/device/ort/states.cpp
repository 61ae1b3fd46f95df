#include "device/ort/states.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <utility>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::int64_t far = std::numeric_limits<std::int64_t>::max(); // the length of states that a step has not finished

std::int64_t size_of(const std::vector<std::int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

} // namespace

RowBlock allocate(std::int64_t num_bytes) {
    void* address = std::calloc(static_cast<std::size_t>(num_bytes), 1);
    if (address == nullptr) throw std::bad_alloc();
    return {static_cast<unsigned char*>(address), std::free};
}

StateRows::StateRows(const RecurrentInfo& info, std::int64_t num_rows) : lengths(static_cast<std::size_t>(num_rows)), info_(info) {
    const auto begun = info.shapes(0); // the inputs before the first token, and the state
    const double num_bytes = static_cast<double>(num_rows) * info.state_bytes(max_outputs);
    try {
        if (num_bytes > 1e18) throw std::bad_alloc();
        for (const auto& [suffix, shape] : info.shapes(max_outputs))
            buffers[suffix] = {shape, size_of(shape), size_of(begun.at(suffix)),
                               allocate(num_rows * size_of(shape) * std::int64_t{sizeof(float)})};
    } catch (const std::bad_alloc&) {
        throw MemoryError("not enough memory: the recurrent layers' states of " + std::to_string(num_rows) + " row(s) take " +
                          std::to_string(std::llround(num_bytes / 1e6)) + " MB; run fewer rows at once, or free memory");
    }
}

std::vector<std::int64_t> StateRows::begin(std::int64_t first, const std::vector<std::int64_t>& kv_length) {
    std::vector<std::int64_t> before;
    for (std::size_t i = 0; i < kv_length.size(); ++i) {
        const std::int64_t row = first + static_cast<std::int64_t>(i);
        before.push_back(kv_length[i] > 0 ? std::exchange(lengths[static_cast<std::size_t>(row)], far) : 0);
        if (kv_length[i] > 0) continue;
        lengths[static_cast<std::size_t>(row)] = far;
        for (const auto& [suffix, buffer] : buffers) std::fill_n(buffer.at(row), buffer.begun, 0.0F);
    }
    return before;
}

void StateRows::move(std::int64_t source, std::int64_t target) {
    lengths[static_cast<std::size_t>(target)] = lengths[static_cast<std::size_t>(source)];
    for (const auto& [suffix, buffer] : buffers) std::copy_n(buffer.at(source), buffer.size, buffer.at(target));
}

std::optional<std::int64_t> StateRows::copy_bytes(std::int64_t row, std::int64_t length) const {
    const std::int64_t kept = length - lengths[static_cast<std::size_t>(row)];
    return kept < 0 ? std::nullopt : std::optional(static_cast<std::int64_t>(info_.state_bytes(kept)));
}

SavedStates StateRows::save(std::int64_t row, std::int64_t length) const {
    SavedStates saved{{}, lengths[static_cast<std::size_t>(row)]};
    for (const auto& [suffix, shape] : info_.shapes(length - saved.length)) {
        const float* const from = buffers.at(suffix).at(row);
        saved.parts[suffix].assign(from, from + size_of(shape));
    }
    return saved;
}

void StateRows::load(std::int64_t row, const SavedStates& saved) {
    for (const auto& [suffix, part] : saved.parts) std::copy(part.begin(), part.end(), buffers.at(suffix).at(row));
    lengths[static_cast<std::size_t>(row)] = saved.length;
}

} // namespace mars
