// How a number becomes a code: as in the standard nodes of the operator, one operation after the other.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

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
    const float low = units > -128 ? units : -128; // also what is not a number, as 0 / 0
    return static_cast<uint8_t>(static_cast<int>(std::nearbyint(low < 127 ? low : 127)) + 128);
}

} // namespace
