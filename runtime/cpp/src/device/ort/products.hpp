// runtime/device/ort/products.py: exact byte products by ONNX Runtime, which w8a8 needs: some kernels add two products
// in 16 bits, with saturation.
#pragma once

#include "device/ort/open.hpp"

namespace mars {

/// Configuration entries with which sessions with `entries` multiply bytes exactly. Tests it once per process. Throws
/// SessionError if there are none, and Ort::Exception.
OrtOptions exact_entries(const Ort::Env& env, const OrtOptions& entries);

} // namespace mars
