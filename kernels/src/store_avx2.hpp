#pragma once

#include <cstdint>
#include <immintrin.h>

#include "tile.hpp"

namespace {

// Eight sums as numbers, in the order of the standard graph: the column's step first, then the row's largest number.
inline void store_avx2(__m256i sums, const int32_t* middles, const float* steps, float largest, float* out) {
    const __m256i exact = _mm256_sub_epi32(sums, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(middles)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(steps)), _mm256_set1_ps(largest)));
}

// Weights of four bits, for AVX2 with and without VNNI
template <size_t MostRows>
struct FourBitsAvx2 : FourBitSizes<8, MostRows> {
    using Sums = __m256i;
    struct Weights {
        __m256i of[8];

        explicit Weights(const int8_t* block) {
            const __m256i low = _mm256_set1_epi8(15);
            for (size_t i = 0; i < 4; ++i) {
                const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + i * FourBitsAvx2::LINE));
                of[i] = _mm256_and_si256(both, low);
                of[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
        }
    };
    struct Bytes { // of both groups: multipliers, and zero points or what belongs to them
        __m256i both, zeros;

        explicit Bytes(const int8_t* bytes) {
            const auto wide = [](const int8_t* from) {
                return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            };
            both = wide(bytes);
            zeros = wide(bytes + FourBitsAvx2::LINE / 2);
        }
    };

    static __m256i codes_of(const void* codes) { return _mm256_set1_epi32(four(codes)); }

    static void store(Sums sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        store_avx2(sums, middles, steps, largest, out);
    }
};

} // namespace
