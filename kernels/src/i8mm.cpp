#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "quantize_neon.hpp"
#include "tile.hpp"

namespace {

// An instruction multiplies eight codes of two rows with eight weights of two columns. Behind an odd number of rows it reads codes of
// another block, whose sums are not stored.
struct I8mm : ByteSizes<8, 8, 8, 2> {
    struct Sums {
        int32x4_t a, b, c, d; // of two columns each: first row, second row
    };
    struct Weights {
        int8x16_t a, b, c, d;
    };

    // Of two columns the first and the second four inputs are one after the other.
    static Weights load(const int8_t* block) {
        const auto four_columns = [](const int8_t* from) { return vreinterpretq_s32_s8(vld1q_s8(from)); };
        const int32x4x2_t left = vzipq_s32(four_columns(block), four_columns(block + LINE));
        const int32x4x2_t right = vzipq_s32(four_columns(block + 16), four_columns(block + LINE + 16));
        return {vreinterpretq_s8_s32(left.val[0]), vreinterpretq_s8_s32(left.val[1]), vreinterpretq_s8_s32(right.val[0]),
                vreinterpretq_s8_s32(right.val[1])};
    }

    static void add(Sums& sums, const Weights& weights, const uint8_t* codes) {
        const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(codes));
        sums.a = vmmlaq_s32(sums.a, x, weights.a);
        sums.b = vmmlaq_s32(sums.b, x, weights.b);
        sums.c = vmmlaq_s32(sums.c, x, weights.c);
        sums.d = vmmlaq_s32(sums.d, x, weights.d);
    }

    static void store(const Sums& sums, size_t row, const int32_t*, const float* steps, float largest, float* out) {
        store_neon(columns(sums.a, sums.b, row), steps, largest, out);
        store_neon(columns(sums.c, sums.d, row), steps + 4, largest, out + 4);
    }

    static int32x4_t columns(int32x4_t first, int32x4_t second, size_t row) {
        const int64x2_t left = vreinterpretq_s64_s32(first), right = vreinterpretq_s64_s32(second);
        return vreinterpretq_s32_s64(row == 0 ? vzip1q_s64(left, right) : vzip2q_s64(left, right));
    }
};

bool is_here() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }

} // namespace

namespace mars::kernels {
const InstructionSet i8mm = set_of<I8mm>("i8mm", is_here, quantize_neon<I8mm::INPUTS>, &dotprod_four_bits);
}
