#pragma once

#include <cstring>
#include <immintrin.h>

#include "quantize.hpp"

namespace {

// x / divisor with the bits of a division, which takes four times as long: the product with the reciprocal, and a correction of its
// rounding. It needs a reciprocal that is rounded to the nearest number, and numbers that are far from overflow; quotients that are too
// small for it become the code of zero anyway.
inline __m512 quotient(__m512 x, __m512 divisor, __m512 reciprocal) {
    const __m512 close = _mm512_mul_ps(x, reciprocal);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(close, divisor, x), reciprocal, close);
}

// InstructionSet::quantize for sets with AVX-512: codes around 128, or signed
template <size_t Block, bool IsSigned>
void quantize_avx512(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    const __m512 step = _mm512_set1_ps(CODE_STEP), steps = _mm512_set1_ps(1 / CODE_STEP);
    const __m512 low = _mm512_set1_ps(-127), high = _mm512_set1_ps(127);
    const size_t even = inputs / 16 * 16;
    for (size_t row = 0; row < rows; ++row, x += inputs) {
        __m512 most = _mm512_setzero_ps(); // the second operand of max if one is not a number
        for (size_t i = 0; i < even; i += 16) most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + i)), most);
        float numbers[16];
        _mm512_storeu_ps(numbers, most);
        largest[row] = largest_of(x, inputs, even, numbers, 16);
        const bool is_far_from_overflow = largest[row] > 0x1p-60f && largest[row] < 0x1p60f;
        const __m512 divisor = _mm512_set1_ps(largest[row]), reciprocal = _mm512_set1_ps(1 / largest[row]);
        for (size_t i = 0; i < even; i += 16) {
            const __m512 number = _mm512_loadu_ps(x + i);
            const __m512 units = is_far_from_overflow ? quotient(quotient(number, divisor, reciprocal), step, steps)
                                                      : _mm512_div_ps(_mm512_div_ps(number, divisor), step);
            const __m512i wide = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(units, low), high)); // not a number: low
            char bytes[16];
            _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes),
                             _mm512_cvtepi32_epi8(_mm512_add_epi32(wide, _mm512_set1_epi32(IsSigned ? 0 : 128))));
            constexpr size_t PART = Block < 16 ? Block : 16;
            for (size_t part = 0; part < 16; part += PART) std::memcpy(codes + code_place<Block>(i + part, row, rows), bytes + part, PART);
        }
        for (size_t i = even; i < inputs; ++i) codes[code_place<Block>(i, row, rows)] = code_of(x[i], largest[row]) ^ (IsSigned ? 0x80 : 0);
    }
}

} // namespace
