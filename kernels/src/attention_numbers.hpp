// How numbers become codes and weights, one operation after the other. Loops are plain, for the compiler to vectorize; nothing here may be
// shared among files that are compiled for different instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention.hpp"

namespace {

using mars::kernels::MOST_DIMS;

constexpr int CODE = 127, WEIGHT = 32767, OCTAVE_BITS = 9, OCTAVES = 24, LOWEST_POWER = -32, POWERS = 64;
constexpr int OCTAVE = 1 << OCTAVE_BITS, STEPS = OCTAVES * OCTAVE;
constexpr float UNSEEN = -1e38f, TINY = 0x1p-40f;
constexpr float POLYNOMIAL[] = {1.0f, -0.69306418f, 0.23946085f, -0.05323139f, 0.00683635f}; // of 2^-x, x from 0 to 1
constexpr size_t WIDE = 16;                                                                  // numbers of a loop's step

inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The sum with this number has no place for fractions: it is rounded to the nearest integer, for up to 2^22.
constexpr float ROUNDER = 0x1.8p23f;

inline float rounded(float x) { return x + ROUNDER - ROUNDER; }
inline int32_t rounded_to_int(float x) { return bits_of(x + ROUNDER) - bits_of(ROUNDER); }

inline float power_of_two(int exponent) { return float_of((exponent + 127) * (1 << 23)); }

// Positive numbers have the order of their bits, and compilers vectorize the maximum of integers.
inline float largest_of(const float* x, size_t count) {
    int32_t most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, bits_of(x[i]) & 0x7fffffff);
    return float_of(most);
}

// Sums of pairs [count], then their differences.
inline void add_neighbours(const float* __restrict x, size_t count, float* __restrict out) {
    for (size_t i = 0; i < count; ++i) {
        out[i] = x[2 * i] + x[2 * i + 1];
        out[i + count] = x[2 * i] - x[2 * i + 1];
    }
}

// out = x by blocks of an orthogonal matrix. x is rounded to integers first, so that sums are exact, in any order.
inline void rotate(const float* x, size_t count, float* out) {
    const size_t block = count & -count;
    const float most = static_cast<float>((size_t{1} << 22) / block), found = largest_of(x, count);
    const float largest = found > TINY ? found : TINY, unit = most / largest;
    const float step = largest * static_cast<float>(1 / (most * std::sqrt(static_cast<double>(block))));
    float numbers[2][MOST_DIMS];
    for (size_t from = 0; from < count; from += block) {
        float *before = numbers[0], *after = numbers[1];
        for (size_t i = 0; i < block; ++i) before[i] = rounded(x[from + i] * unit);
        for (size_t half = 1; half < block; half *= 2, std::swap(before, after)) // of neighbours, so that each stage is the same
            add_neighbours(before, block / 2, after);
        for (size_t i = 0; i < block; ++i) out[from + i] = before[i] * step;
    }
}

inline void write_entry(const float* x, size_t count, int8_t* entry) {
    const float largest = largest_of(x, count);
    const int reached = (bits_of(largest) >> 23) - 127 - LOWEST_POWER + 1, power = reached < 0 ? 0 : reached > POWERS ? POWERS : reached;
    const float unit = power_of_two(power + LOWEST_POWER - 8), up = std::ceil(largest / unit);
    const float share = up > 256 ? 256 : up > 128 ? up : 128;
    const float step = unit * share * (1.0f / CODE);
    for (size_t i = 0; i < count; ++i) {
        const float units = rounded(x[i] / step);
        entry[i] = static_cast<int8_t>(static_cast<int>(units > CODE ? CODE : units > -CODE ? units : -CODE));
    }
    entry[count] = static_cast<int8_t>(power - POWERS / 2);
    entry[count + 1] = static_cast<int8_t>(static_cast<int>(share) - 192);
}

// The scale of an entry's codes, CODE times their unit.
inline float scale_of(const int8_t* bytes) {
    return power_of_two(bytes[0] + POWERS / 2 + LOWEST_POWER - 8) * static_cast<float>(bytes[1] + 192);
}

// The codes of a rotated query, in the order in which keys are unpacked, and the steps that a unit of their products with keys is worth.
inline float write_query(const float* x, size_t count, float scale, float* scratch, int16_t* codes) {
    int most = 1;
    while (static_cast<size_t>(most) * 2 * CODE * count <= size_t{1} << 24) most *= 2;
    most -= 1;
    rotate(x, count, scratch);
    const float found = largest_of(scratch, count), largest = found > TINY ? found : TINY;
    const float unit = static_cast<float>(most) / largest;
    for (size_t i = 0; i < count; ++i) codes[i] = static_cast<int16_t>(rounded_to_int(scratch[i] * unit));
    for (size_t i = 0; i + 2 < count; i += 4) {
        const int16_t second = codes[i + 1];
        codes[i + 1] = codes[i + 2];
        codes[i + 2] = second;
    }
    return largest * (scale * static_cast<float>(1.4426950408889634 * OCTAVE / (CODE * most)));
}

// Numbers of any sign have the order of these integers.
inline int32_t in_order(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

// The weight, an integer of at most 2^22, of a score that is this many steps below the highest one.
inline int32_t weight_of(float below) {
    const int32_t step = rounded_to_int(below < STEPS ? below : STEPS);
    const float x = static_cast<float>(step & (OCTAVE - 1)) * (1.0f / OCTAVE);
    float value = POLYNOMIAL[4];
    for (int term = 3; term >= 0; --term) value = value * x + POLYNOMIAL[term];
    return rounded_to_int(float_of(bits_of(value) + (22 - (step >> OCTAVE_BITS)) * (1 << 23)));
}

// Scores [count] to integer weights of values with these scales. `factor`: steps of a score. Returns the number that a unit of weights
// times codes is worth. `scores` are overwritten.
inline float write_weights(float* __restrict scores, const float* __restrict scales, size_t count, float factor,
                           int16_t* __restrict weights) {
    int32_t highest = in_order(bits_of(UNSEEN));
    for (size_t i = 0; i < count; ++i) highest = std::max(highest, in_order(bits_of(scores[i])));
    const float top = float_of(in_order(highest));
    int64_t total = 0;
    int32_t largest = 0;
    constexpr size_t PART = 256; // the sum of fewer weights fits into 32 bits
    for (size_t from = 0; from < count; from += PART) {
        int32_t sum = 0;
        for (size_t i = from; i < std::min(from + PART, count); ++i) {
            const int32_t weight = weight_of((top - scores[i]) * factor);
            sum += weight;
            scores[i] = static_cast<float>(weight) * scales[i];
            largest = std::max(largest, bits_of(scores[i])); // none is negative
        }
        total += sum;
    }
    const float most = float_of(largest), unit = WEIGHT / most;
    for (size_t i = 0; i < count; ++i) weights[i] = static_cast<int16_t>(rounded_to_int(scores[i] * unit));
    return most * static_cast<float>(1.0 / (CODE * WEIGHT)) / static_cast<float>(total);
}

} // namespace
