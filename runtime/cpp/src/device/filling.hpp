// The few sizes of step that an engine is run in: smaller ones are filled up. Twin of runtime/device/filling.py; knows no device.
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "bundle/engine_info.hpp"
#include "decode/backend.hpp"

namespace mars {

/// A context and its CUDA graph belong to one size, and a step of few slots takes a GPU as long as one of several. Filling stands behind what
/// was asked for, which therefore does not see it; what it writes lies behind every cursor, where the next step writes.
class Filling {
  public:
    /// Of an engine that holds `capacity` entries in a row; `is_fixed`: built for one size, which is filled in any case.
    Filling(const EngineInfo& info, std::int64_t capacity, bool is_fixed);

    /// The step filled up, or nothing where it has one of the sizes. Where a row has no room for more slots they stay as many.
    ///
    /// Throws SessionError for a step beyond the one size of an engine.
    std::optional<StepInput> filled(const StepInput& input) const;

  private:
    std::int64_t rows_, capacity_;
    bool is_fixed_;
    std::set<std::int64_t> slots_, outputs_;
};

/// The smallest size that holds `wanted`; `wanted` itself where there is none up to `most`.
std::int64_t least_of(const std::set<std::int64_t>& sizes, std::int64_t wanted, std::int64_t most);

/// A step with more rows, slots and predictions: zeros behind what was asked for, and rows that nobody asked for at the cursor `idle`.
StepInput padded(const StepInput& input, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::int64_t idle);

} // namespace mars
