#pragma once

#include <cstddef>
#include <cstdint>

namespace mars::kernels {
// InstructionSet::quantize for blocks of 4 and of 8 inputs, for sets without AVX-512
template <size_t Block>
void quantize_avx2(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest);
} // namespace mars::kernels
