#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "quantize_neon.hpp"
#include "tile.hpp"

namespace {

// One row has four sums that do not wait for each other; those of five rows and the weights fit into the registers.
struct DotProd {
    static constexpr size_t COLUMNS = 16, INPUTS = 4, ROWS = 1, MOST_ROWS = 5;
    static constexpr bool ADDS_IN_16_BITS = false;
    struct Sums {
        int32x4_t a, b, c, d;
    };
    struct Weights {
        int8x16_t a, b, c, d;
    };

    static Weights load(const int8_t* block) { return {vld1q_s8(block), vld1q_s8(block + 16), vld1q_s8(block + 32), vld1q_s8(block + 48)}; }

    static void add(Sums& sums, const Weights& weights, const uint8_t* codes) {
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four(codes)));
        sums.a = vdotq_s32(sums.a, weights.a, x);
        sums.b = vdotq_s32(sums.b, weights.b, x);
        sums.c = vdotq_s32(sums.c, weights.c, x);
        sums.d = vdotq_s32(sums.d, weights.d, x);
    }

    static void store(const Sums& sums, size_t, const int32_t*, const float* steps, float largest, float* out) {
        store_neon(sums.a, steps, largest, out);
        store_neon(sums.b, steps + 4, largest, out + 4);
        store_neon(sums.c, steps + 8, largest, out + 8);
        store_neon(sums.d, steps + 12, largest, out + 12);
    }
};

bool is_here() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits =
    set_of<DotProdFourBits>("dotprod", is_here, quantize_groups<quantize_neon<FourBits::GROUP>>, FourBits::GROUP);
const InstructionSet dotprod = set_of<DotProd>("dotprod", is_here, quantize_neon<DotProd::INPUTS>, 4, &four_bits);
} // namespace mars::kernels
