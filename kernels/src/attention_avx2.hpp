#pragma once

#include <immintrin.h>

#include "attention_tile.hpp"

namespace {

inline __m128i sixteen(const int8_t* chunk) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk)); }

// What AVX2 and AVX-VNNI have in common.
struct Avx2Lanes {
    static constexpr size_t LANES = 8, WIDTH = 16, ENTRIES = 16, QUERIES = 24;
    using Vector = __m256i;

    static Vector load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
    static void store(int32_t* to, Vector x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }

    static void store_scaled(float* to, Vector x, const float* scales) {
        _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_loadu_ps(scales)));
    }

    static Vector pair(const int16_t* two) {
        int32_t both;
        std::memcpy(&both, two, sizeof both);
        return _mm256_set1_epi32(both);
    }

    // Four dimensions of each entry become pairs: the first with the third, the second with the fourth.
    static void unpack_keys(const int8_t* first, size_t stride, int32_t* out) {
        const auto entry = [first, stride](size_t l) { return sixteen(first + l * stride); };
        __m256i x[4];
        for (size_t i = 0; i < 4; ++i) x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(entry(i)), entry(i + 4), 1);
        const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
        const __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        for (const __m256i four :
             {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)}) {
            store(out, _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8));
            store(out + LANES, _mm256_srai_epi16(four, 8));
            out += 2 * LANES;
        }
    }

    static void unpack_values(const int8_t* first, const int8_t* second, int32_t* out) {
        const __m128i a = sixteen(first), b = sixteen(second);
        store(out, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)));
        store(out + LANES, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
    }
};

} // namespace
