#include "quantize.hpp"
#include "quantize_avx2.hpp"
#include "store_avx2.hpp"
#include "tile.hpp"

namespace {

struct AvxVnni : CopiedSizes<16, 4, 6> {
    struct Sums {
        __m256i left, right;
    };
    using Weights = Sums;

    static Weights load(const int8_t* block) {
        const auto* lines = reinterpret_cast<const __m256i*>(block);
        return {_mm256_loadu_si256(lines), _mm256_loadu_si256(lines + 1)};
    }

    static void add(Sums& sums, const Weights& weights, const uint8_t* codes) {
        const __m256i x = _mm256_set1_epi32(four(codes));
        sums.left = _mm256_dpbusd_avx_epi32(sums.left, x, weights.left);
        sums.right = _mm256_dpbusd_avx_epi32(sums.right, x, weights.right);
    }

    static void store(const Sums& sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        store_avx2(sums.left, middles, steps, largest, out);
        store_avx2(sums.right, middles + 8, steps + 8, largest, out + 8);
    }
};

struct AvxVnniFourBits : FourBitsAvx2<6> {
    struct Factors : Bytes {
        __m256i of[2];

        explicit Factors(const int8_t* bytes) : Bytes(bytes) {
            of[0] = _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
            of[1] = _mm256_srli_epi32(both, 16);
            zeros = _mm256_mullo_epi16(both, _mm256_sub_epi16(_mm256_set1_epi16(8), zeros));
        }
    };

    // As with AVX-512.
    static void add(Sums& sums, const Weights& weights, __m256i factor, const uint8_t* codes, int32_t start) {
        __m256i product = _mm256_set1_epi32(start);
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; ++i) product = _mm256_dpbusd_avx_epi32(product, weights.of[i], codes_of(codes + 4 * i));
        sums = _mm256_dpwssd_avx_epi32(sums, product, factor);
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        sums = _mm256_dpwssd_avx_epi32(sums, factors.zeros, codes_of(both));
    }
};

bool is_here() { return mars::kernels::Processor().avx_vnni; }

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits = set_of<AvxVnniFourBits>("avx_vnni", is_here, quantize_groups<quantize_avx2<BLOCK, true>>);
const InstructionSet avx_vnni = set_of<AvxVnni>("avx_vnni", is_here, quantize_avx2<AvxVnni::INPUTS, false>, &four_bits);
} // namespace mars::kernels
