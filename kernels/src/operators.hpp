// The operators of w8a8 graphs, for this package's library and for libmars, into which they are linked.
#pragma once

struct OrtSessionOptions;

namespace mars::kernels {

// Add the operators to a session's options, after Ort::InitApi. Throws Ort::Exception.
void add_operators(OrtSessionOptions* options);

// The instruction set that they use: the one that MARS_EXPORT_KERNELS names if this processor has it, else the fastest here.
const char* instructions();

} // namespace mars::kernels
