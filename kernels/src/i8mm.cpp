#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "quantize_neon.hpp"
#include "tile.hpp"

namespace {

// An instruction multiplies eight codes of two rows with eight weights of two columns. Behind an odd number of rows it reads codes of
// another block, whose sums are not stored.
struct I8mm {
    static constexpr size_t COLUMNS = 8, INPUTS = 8, ROWS = 2, MOST_ROWS = 8;
    static constexpr bool ADDS_IN_16_BITS = false;
    struct Sums {
        int32x4_t a, b, c, d; // of two columns each: first row, second row
    };
    struct Weights {
        int8x16_t a, b, c, d;
    };

    static Weights load(const int8_t* block) { return {vld1q_s8(block), vld1q_s8(block + 16), vld1q_s8(block + 32), vld1q_s8(block + 48)}; }

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
const InstructionSet i8mm = set_of<I8mm>("i8mm", is_here, quantize_neon<I8mm::INPUTS>, 8, &dotprod_four_bits);
}
