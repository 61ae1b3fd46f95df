// runtime/device/trt/shape_bucket.py: pads steps to the few sizes that an engine runs in.
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"

namespace mars {

/// An execution context and its CUDA graph are bound to one size, and a step of few slots takes a GPU as long as one of
/// several. Padding stands after the real slots, which do not see it. The entries it writes lie after every cursor,
/// where the next step writes.
class ShapeBucket {
  public:
    /// `capacity`: entries of a row. `is_fixed`: the engine has a single size, to which every step is padded.
    ShapeBucket(const EngineInfo& info, std::int64_t capacity, bool is_fixed);

    /// The padded step; no value if it has one of the sizes already. Slots are not added if a row has no room for them.
    ///
    /// Throws SessionError for a step larger than an engine's single size.
    std::optional<StepInput> filled(const StepInput& input) const;

  private:
    std::int64_t rows_, capacity_;
    bool is_fixed_;
    std::set<std::int64_t> slots_, outputs_;
};

/// The smallest size that holds `wanted`; `wanted` itself if there is none up to `most`.
std::int64_t smallest_fit(const std::set<std::int64_t>& sizes, std::int64_t wanted, std::int64_t most);

/// A step with more rows, slots and predictions: zeros after the real ones; additional rows have the cursor `idle`.
StepInput padded(const StepInput& input, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::int64_t idle);

} // namespace mars
