#include "quantize_avx2.hpp"
#include "store_avx2.hpp"
#include "tile.hpp"

namespace {

struct AvxVnni {
    static constexpr size_t COLUMNS = 16, INPUTS = 4, ROWS = 1, MOST_ROWS = 6;
    static constexpr bool ADDS_IN_16_BITS = false;
    struct Sums {
        __m256i left, right;
    };
    using Weights = Sums;

    static Weights load(const int8_t* block) {
        const auto* lines = reinterpret_cast<const __m256i*>(block);
        return {_mm256_load_si256(lines), _mm256_load_si256(lines + 1)};
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

bool is_here() { return mars::kernels::Processor().avx_vnni; }

} // namespace

namespace mars::kernels {
const InstructionSet avx_vnni{"avx_vnni",
                              is_here,
                              AvxVnni::COLUMNS,
                              AvxVnni::INPUTS,
                              4,
                              AvxVnni::MOST_ROWS,
                              false,
                              quantize_avx2<AvxVnni::INPUTS, false>,
                              multiply_panels<AvxVnni>};
}
