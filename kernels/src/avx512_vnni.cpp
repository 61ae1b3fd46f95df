#include <immintrin.h>

#include "quantize_avx512.hpp"
#include "tile.hpp"

namespace {

// Compilers copy a sum before each product that adds to it. With more than 8 rows the copies do not fit into the registers, and products
// take twice as long.
struct Avx512Vnni {
    static constexpr size_t COLUMNS = 32, INPUTS = 4, ROWS = 1, MOST_ROWS = 8;
    static constexpr bool ADDS_IN_16_BITS = false;
    struct Sums {
        __m512i left, right;
    };
    using Weights = Sums;

    static Weights load(const int8_t* block) { return {_mm512_load_si512(block), _mm512_load_si512(block + 64)}; }

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

bool is_here() { return mars::kernels::Processor().avx512_vnni; }

} // namespace

namespace mars::kernels {
const InstructionSet avx512_vnni{"avx512_vnni",
                                 is_here,
                                 Avx512Vnni::COLUMNS,
                                 Avx512Vnni::INPUTS,
                                 4,
                                 Avx512Vnni::MOST_ROWS,
                                 false,
                                 quantize_avx512<Avx512Vnni::INPUTS>,
                                 multiply_panels<Avx512Vnni>};
}
