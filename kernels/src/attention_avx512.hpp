#pragma once

#include <immintrin.h>

#include "attention_tile.hpp"

namespace {

inline __m128i sixteen(const int8_t* chunk) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk)); }

struct Avx512Vnni {
    static constexpr size_t LANES = 16, WIDTH = 64, ENTRIES = 16, QUERIES = 24;
    using Vector = __m512i;

    static Vector load(const int32_t* from) { return _mm512_loadu_si512(from); }
    static void store(int32_t* to, Vector x) { _mm512_storeu_si512(to, x); }
    // Not the intrinsic: GCC 12 copies the sums before each of them.
    static Vector add_products(Vector sums, Vector pairs, Vector two) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(pairs), "v"(two));
        return sums;
    }

    static void store_scaled(float* to, Vector x, const float* scales) {
        _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_loadu_ps(scales)));
    }

    static Vector pair(const int16_t* two) {
        int32_t both;
        std::memcpy(&both, two, sizeof both);
        return _mm512_set1_epi32(both);
    }

    // use(d, four) with the dimensions d to d + 3 of each of 16 entries, for d = 0, 4, 8, 12.
    template <class Use>
    static void transpose(const int8_t* first, size_t stride, Use use) {
        const auto entry = [first, stride](size_t l) { return sixteen(first + l * stride); };
        __m512i x[4];
        for (size_t i = 0; i < 4; ++i) {
            x[i] = _mm512_inserti32x4(_mm512_castsi128_si512(entry(i)), entry(i + 4), 1);
            x[i] = _mm512_inserti32x4(_mm512_inserti32x4(x[i], entry(i + 8), 2), entry(i + 12), 3);
        }
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
        const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        use(0, _mm512_unpacklo_epi64(a, b));
        use(4, _mm512_unpackhi_epi64(a, b));
        use(8, _mm512_unpacklo_epi64(c, d));
        use(12, _mm512_unpackhi_epi64(c, d));
    }

    // Four dimensions of each entry become pairs: the first with the third, the second with the fourth.
    static void unpack_keys(const int8_t* first, size_t stride, int32_t* out) {
        transpose(first, stride, [out](size_t d, __m512i four) {
            store(out + d / 2 * LANES, _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8));
            store(out + (d / 2 + 1) * LANES, _mm512_srai_epi16(four, 8));
        });
    }

    static void unpack_values(const int8_t* first, const int8_t* second, int32_t* out) {
        const __m128i a = sixteen(first), b = sixteen(second);
        store(out, _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b))));
    }
};

} // namespace
