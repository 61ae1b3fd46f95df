#pragma once

#include <cstddef>
#include <cstdint>

namespace mars::kernels {
// InstructionSet::quantize for sets without AVX-512: codes around 128, or signed
template <size_t Block, bool IsSigned>
void quantize_avx2(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest);
} // namespace mars::kernels
