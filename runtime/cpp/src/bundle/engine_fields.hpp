// Reads the manifest's `engine` object.
#pragma once

#include "bundle/engine_info.hpp"
#include "bundle/fields.hpp"

namespace mars {

/// The `engine` object of a variant; problems are added to `fields`.
EngineInfo read_engine(Fields fields);

} // namespace mars
