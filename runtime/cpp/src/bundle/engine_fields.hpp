// The manifest's `engine` object, read. Knows the words of docs/format.md and no TensorRT.
#pragma once

#include "bundle/engine_info.hpp"
#include "bundle/fields.hpp"

namespace mars {

/// The `engine` object of a variant; notes problems in `fields`.
EngineInfo read_engine(Fields fields);

} // namespace mars
