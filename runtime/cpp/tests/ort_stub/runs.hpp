// Runs of the stub's sessions as the provider makes them: plainly, captured under a number, or replayed.
#pragma once

#include "ort_stub/state.hpp"

namespace cuda_provider {

/// Whoever calls holds the state's mutex.
OrtStatus* run(OrtSession* session, const OrtRunOptions* options, const Binding& bound);

} // namespace cuda_provider
