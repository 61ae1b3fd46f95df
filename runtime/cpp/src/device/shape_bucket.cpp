#include "device/shape_bucket.hpp"

#include <algorithm>

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr std::int64_t least_piece = 16; // slots of the smallest step of a prompt that is wider than any decode step

/// Rows of `width` numbers, extended to `all` by zeros.
std::vector<std::int64_t> widened(const std::vector<std::int64_t>& values, std::int64_t rows, std::int64_t width, std::int64_t all_rows,
                                  std::int64_t all) {
    std::vector<std::int64_t> wide(static_cast<std::size_t>(all_rows * all));
    for (std::int64_t row = 0; row < rows; ++row) std::copy_n(values.begin() + row * width, width, wide.begin() + row * all);
    return wide;
}

} // namespace

std::int64_t smallest_fit(const std::set<std::int64_t>& sizes, std::int64_t wanted, std::int64_t most) {
    const auto at = sizes.lower_bound(wanted);
    return at != sizes.end() && *at <= most ? *at : wanted;
}

ShapeBucket::ShapeBucket(const EngineInfo& info, std::int64_t capacity, bool is_fixed)
    : rows_(info.max_rows()), capacity_(capacity), is_fixed_(is_fixed), slots_{info.max_slots()}, outputs_{info.max_outputs()} {
    std::int64_t widest = 0;
    for (const ShapeRange& range : info.ranges) {
        outputs_.insert({range.outputs.min, range.outputs.opt, range.outputs.max});
        if (range.name != "decode") continue;
        slots_.insert({range.slots.min, range.slots.opt, range.slots.max});
        widest = std::max(widest, range.slots.max);
    }
    for (std::int64_t size = least_piece; size < info.max_slots(); size *= 2)
        if (size > widest) slots_.insert(size);
}

std::optional<StepInput> ShapeBucket::filled(const StepInput& input) const {
    std::int64_t rows = input.rows, slots = *slots_.rbegin(), outputs = slots;
    if (is_fixed_) {
        if (input.rows > rows_ || input.slots > slots)
            throw SessionError("a step of " + std::to_string(input.rows) + " x " + std::to_string(input.slots) +
                               " slots; this engine is for exactly " + std::to_string(rows_) + " x " + std::to_string(slots));
        rows = rows_;
    } else {
        slots = smallest_fit(slots_, input.slots, capacity_ - *std::max_element(input.kv_length.begin(), input.kv_length.end()));
        outputs = smallest_fit(outputs_, input.outputs, *outputs_.rbegin());
        if (slots == input.slots && outputs == input.outputs) return std::nullopt;
    }
    return padded(input, rows, slots, outputs, capacity_ - slots);
}

StepInput padded(const StepInput& input, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::int64_t idle) {
    StepInput full{rows, slots, outputs, {}, input.kv_length, {}, input.want_topk};
    full.input_ids = widened(input.input_ids, input.rows, input.slots, rows, slots);
    full.output_index = widened(input.output_index, input.rows, input.outputs, rows, outputs);
    full.kv_length.resize(static_cast<std::size_t>(rows), idle);
    return full;
}

} // namespace mars
