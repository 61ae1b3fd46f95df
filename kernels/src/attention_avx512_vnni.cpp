#include <immintrin.h>

#include "attention_tile.hpp"

namespace {

inline __m128i sixteen(const int8_t* chunk) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk)); }

struct Avx512Vnni {
    static constexpr size_t LANES = 16, WIDTH = 64;
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

    // Four dimensions of each entry become pairs: the first with the third, the second with the fourth.
    static void unpack_keys(const int8_t* first, size_t stride, int32_t* out) {
        const auto entry = [first, stride](size_t l) { return sixteen(first + l * stride); };
        __m512i x[4];
        for (size_t i = 0; i < 4; ++i) {
            x[i] = _mm512_inserti32x4(_mm512_castsi128_si512(entry(i)), entry(i + 4), 1);
            x[i] = _mm512_inserti32x4(_mm512_inserti32x4(x[i], entry(i + 8), 2), entry(i + 12), 3);
        }
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
        const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        for (const __m512i four :
             {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)}) {
            store(out, _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8));
            store(out + LANES, _mm512_srai_epi16(four, 8));
            out += 2 * LANES;
        }
    }

    static void unpack_values(const int8_t* first, const int8_t* second, int32_t* out) {
        const __m128i a = sixteen(first), b = sixteen(second);
        store(out, _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b))));
    }
};

} // namespace

namespace mars::kernels {
const AttentionCode attention_avx512_vnni{"avx512_vnni", write, attend_tile<Avx512Vnni>};
}
