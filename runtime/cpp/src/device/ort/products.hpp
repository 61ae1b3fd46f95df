// Whether ONNX Runtime's byte products are exact on this processor, on which w8a8 rests: some kernels add two of them in 16 bits, with
// saturation. Twin of runtime/device/ort/products.py.
#pragma once

#include "device/ort/api.hpp"
#include "device/ort/options.hpp"

namespace mars {

/// Multiplies the worst codes once in a process. Throws SessionError where a product is wrong, and Ort::Exception.
void require_exact_products(const Ort::Env& env, const OrtOptions& entries);

} // namespace mars
