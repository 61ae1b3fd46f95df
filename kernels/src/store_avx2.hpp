#pragma once

#include <cstdint>
#include <immintrin.h>

namespace {

// Eight sums as numbers, in the order of the standard graph: the column's step first, then the row's largest number.
inline void store_avx2(__m256i sums, const int32_t* middles, const float* steps, float largest, float* out) {
    const __m256i exact = _mm256_sub_epi32(sums, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(middles)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(steps)), _mm256_set1_ps(largest)));
}

} // namespace
