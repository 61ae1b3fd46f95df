// runtime/device/ort/products.py: checks that ONNX Runtime's byte products are exact on this processor (w8a8): some
// kernels add two products in 16 bits, with saturation.
#pragma once

#include "device/ort/open.hpp"

namespace mars {

/// Checks once per process. Throws SessionError if a product is wrong, and Ort::Exception.
void require_exact_products(const Ort::Env& env, const OrtOptions& entries);

} // namespace mars
