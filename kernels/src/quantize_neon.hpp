#pragma once

#include <arm_neon.h>
#include <cstring>

#include "quantize.hpp"

namespace {

// InstructionSet::quantize for signed codes
template <size_t Block>
void quantize_neon(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    const float32x4_t step = vdupq_n_f32(CODE_STEP), low = vdupq_n_f32(-127), high = vdupq_n_f32(127);
    const size_t even = inputs / 8 * 8;
    for (size_t row = 0; row < rows; ++row, x += inputs) {
        float32x4_t most = vdupq_n_f32(0); // the "nm" instructions choose the other one if one is not a number
        for (size_t i = 0; i < even; i += 4) most = vmaxnmq_f32(most, vabsq_f32(vld1q_f32(x + i)));
        float numbers[4];
        vst1q_f32(numbers, most);
        largest[row] = largest_of(x, inputs, even, numbers, 4);
        const float32x4_t divisor = vdupq_n_f32(largest[row]);
        const auto four_codes = [&](size_t i) {
            const float32x4_t units = vdivq_f32(vdivq_f32(vld1q_f32(x + i), divisor), step);
            return vqmovn_s32(vcvtnq_s32_f32(vminnmq_f32(vmaxnmq_f32(units, low), high)));
        };
        for (size_t i = 0; i < even; i += 8) {
            int8_t eight[8];
            vst1_s8(eight, vqmovn_s16(vcombine_s16(four_codes(i), four_codes(i + 4))));
            constexpr size_t PART = Block < 8 ? Block : 8;
            for (size_t part = 0; part < 8; part += PART) std::memcpy(codes + code_place<Block>(i + part, row, rows), eight + part, PART);
        }
        for (size_t i = even; i < inputs; ++i) codes[code_place<Block>(i, row, rows)] = code_of(x[i], largest[row]) ^ 0x80;
    }
}

// Sums of signed codes as numbers, in the order of the standard graph: the column's step first, then the row's largest number.
inline void store_neon(int32x4_t sums, const float* steps, float largest, float* out) {
    vst1q_f32(out, vmulq_n_f32(vmulq_f32(vcvtq_f32_s32(sums), vld1q_f32(steps)), largest));
}

} // namespace
