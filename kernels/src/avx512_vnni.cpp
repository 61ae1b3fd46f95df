#include <immintrin.h>

#include "quantize_avx512.hpp"
#include "tile.hpp"

namespace {

// Compilers copy a sum before each product that adds to it. With more than 8 rows the copies do not fit into the registers, and products
// take twice as long.
struct Avx512Vnni : ByteSizes<32, 4, 8> {
    struct Sums {
        __m512i left, right;
    };
    using Weights = Sums;

    static Weights load(const int8_t* block) { return {_mm512_loadu_si512(block), _mm512_loadu_si512(block + 64)}; }

    static void add(Sums& sums, const Weights& weights, const uint8_t* codes) {
        const __m512i x = _mm512_set1_epi32(four(codes));
        sums.left = _mm512_dpbusd_epi32(sums.left, x, weights.left);
        sums.right = _mm512_dpbusd_epi32(sums.right, x, weights.right);
    }

    static void store(const Sums& sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        half(sums.left, middles, steps, largest, out);
        half(sums.right, middles + 16, steps + 16, largest, out + 16);
    }

    static void half(__m512i sums, const int32_t* middles, const float* steps, float largest, float* out) {
        const __m512 units = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_loadu_si512(middles)));
        _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_mul_ps(units, _mm512_loadu_ps(steps)), _mm512_set1_ps(largest)));
    }
};

struct Avx512FourBits : FourBitSizes<16, 10> {
    using Sums = __m512i;
    struct Factors {
        __m512i of[2], zeros;

        explicit Factors(const int8_t* bytes) {
            const auto* lines = reinterpret_cast<const __m256i*>(bytes);
            const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(lines));
            of[0] = _mm512_and_si512(both, _mm512_set1_epi32(0xffff));
            of[1] = _mm512_srli_epi32(both, 16);
            zeros = _mm512_mullo_epi16(both, _mm512_sub_epi16(_mm512_set1_epi16(8), _mm512_cvtepu8_epi16(_mm256_loadu_si256(lines + 1))));
        }
    };
    struct Weights {
        __m512i of[8];

        explicit Weights(const int8_t* block) {
            const __m512i low = _mm512_set1_epi8(15);
            for (size_t i = 0; i < 4; ++i) {
                const __m512i both = _mm512_loadu_si512(block + i * 64);
                of[i] = _mm512_and_si512(both, low);
                of[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
        }
    };

    // The product with a group fits into 16 bits, so that one instruction multiplies it and adds.
    static void add(Sums& sums, const Weights& weights, __m512i factor, const uint8_t* codes, int32_t start) {
        __m512i product = _mm512_set1_epi32(start);
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; ++i) product = _mm512_dpbusd_epi32(product, weights.of[i], _mm512_set1_epi32(four(codes + 4 * i)));
        sums = _mm512_dpwssd_epi32(sums, product, factor);
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        sums = _mm512_dpwssd_epi32(sums, factors.zeros, _mm512_set1_epi32(four(both)));
    }

    static void store(Sums sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        Avx512Vnni::half(sums, middles, steps, largest, out);
    }
};

bool is_here() { return mars::kernels::Processor().avx512_vnni; }

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits = set_of<Avx512FourBits>("avx512_vnni", is_here, quantize_groups<quantize_avx512<BLOCK, true>>);
const InstructionSet avx512_vnni = set_of<Avx512Vnni>("avx512_vnni", is_here, quantize_avx512<Avx512Vnni::INPUTS, false>, &four_bits);
} // namespace mars::kernels
