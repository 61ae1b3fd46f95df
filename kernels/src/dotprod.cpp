#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "quantize_neon.hpp"
#include "tile.hpp"

namespace {

// One row has four sums that do not wait for each other; those of five rows and the weights fit into the registers.
struct DotProd : ByteSizes<16, 4, 5> {
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

struct DotProdFourBits : FourBitSizes<8, 5> {
    struct Sums {
        int32x4_t a, b;
    };
    struct Factors {
        int32x4_t of[2][2], zeros[2][2];

        explicit Factors(const int8_t* bytes) {
            const uint8x8x2_t multipliers = vld2_u8(reinterpret_cast<const uint8_t*>(bytes));
            const uint8x8x2_t zero_points = vld2_u8(reinterpret_cast<const uint8_t*>(bytes) + LINE / 2);
            for (size_t group = 0; group < 2; ++group) {
                const int16x8_t all = vreinterpretq_s16_u16(vmovl_u8(multipliers.val[group]));
                const int16x8_t zero = vsubq_s16(vdupq_n_s16(8), vreinterpretq_s16_u16(vmovl_u8(zero_points.val[group])));
                of[group][0] = vmovl_s16(vget_low_s16(all));
                of[group][1] = vmovl_s16(vget_high_s16(all));
                zeros[group][0] = vmull_s16(vget_low_s16(all), vget_low_s16(zero));
                zeros[group][1] = vmull_s16(vget_high_s16(all), vget_high_s16(zero));
            }
        }
    };
    struct Weights {
        int8x16_t of[8][2]; // from -8 to 7

        explicit Weights(const int8_t* block) {
            for (size_t i = 0; i < 8; ++i) {
                const uint8x16_t both = vld1q_u8(reinterpret_cast<const uint8_t*>(block) + i / 2 * LINE + i % 2 * 16);
                of[i / 2][i % 2] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vdupq_n_s8(8));
                of[i / 2 + 4][i % 2] = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), vdupq_n_s8(8));
            }
        }
    };

    static void add(Sums& sums, const Weights& weights, const int32x4_t* factor, const uint8_t* codes, int32_t) {
        Sums product{};
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; ++i) {
            const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four(codes + 4 * i)));
            product.a = vdotq_s32(product.a, weights.of[i][0], x);
            product.b = vdotq_s32(product.b, weights.of[i][1], x);
        }
        sums.a = vmlaq_s32(sums.a, product.a, factor[0]);
        sums.b = vmlaq_s32(sums.b, product.b, factor[1]);
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        for (size_t group = 0; group < 2; ++group) {
            sums.a = vmlaq_n_s32(sums.a, factors.zeros[group][0], both[group]);
            sums.b = vmlaq_n_s32(sums.b, factors.zeros[group][1], both[group]);
        }
    }

    static void store(const Sums& sums, size_t, const int32_t*, const float* steps, float largest, float* out) {
        store_neon(sums.a, steps, largest, out);
        store_neon(sums.b, steps + 4, largest, out + 4);
    }
};

bool is_here() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

} // namespace

namespace mars::kernels {
const InstructionSet dotprod_four_bits = set_of<DotProdFourBits>("dotprod", is_here, quantize_groups<quantize_neon<BLOCK>>);
const InstructionSet dotprod = set_of<DotProd>("dotprod", is_here, quantize_neon<DotProd::INPUTS>, &dotprod_four_bits);
} // namespace mars::kernels
