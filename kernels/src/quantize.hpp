// How a number becomes a code: as in the standard nodes of the operator, one operation after the other.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "product.hpp"

namespace {

constexpr float CODE_STEP = 1.0f / 127;

// Where the code of an input of a row is in a tile.
template <size_t Block>
size_t code_place(size_t input, size_t row, size_t rows) {
    return (input / Block * rows + row) * Block + input % Block;
}

// The largest of `count` numbers and of |x[from]| to |x[inputs - 1]|. What is not a number does not count.
inline float largest_of(const float* x, size_t inputs, size_t from, const float* numbers, size_t count) {
    float most = 0;
    for (size_t i = 0; i < count; ++i) most = numbers[i] > most ? numbers[i] : most;
    for (size_t i = from; i < inputs; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    return most;
}

inline uint8_t code_of(float x, float largest) {
    const float units = x / largest / CODE_STEP;
    const float low = units > -127 ? units : -127; // also what is not a number, as 0 / 0
    return static_cast<uint8_t>(static_cast<int>(std::nearbyint(low < 127 ? low : 127)) + 128);
}

// InstructionSet::quantize for weights of four bits, from one with signed codes
template <auto Quantize>
void quantize_groups(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    using mars::kernels::BLOCK, mars::kernels::GROUP, mars::kernels::GroupSums;
    Quantize(x, rows, inputs, codes, largest);
    const size_t blocks = (inputs + BLOCK - 1) / BLOCK;
    auto* const sums = reinterpret_cast<GroupSums*>(codes + blocks * BLOCK * rows);
    for (size_t group = 0; group < 2 * blocks * rows; ++group, codes += GROUP) {
        int sum = 0;
        for (size_t i = 0; i < GROUP; ++i) sum += static_cast<int8_t>(codes[i]);
        sums[group / 2].starts[group % 2] = -8 * sum;
        sums[group / 2].of[group % 2] = static_cast<int16_t>(sum);
    }
}

} // namespace
