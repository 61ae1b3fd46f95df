// runtime/device/step_io.py: step inputs and results on a GPU, packed for one copy in each direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "decode/backend.hpp"
#include "device/cuda.hpp"

namespace mars {

/// Whether an output is int64, and whether it has several values for each prediction.
inline bool is_ids(const std::string& name) { return name == "token_ids" || name == "topk_ids"; }
inline bool is_wide(const std::string& name) { return name == "logits" || name == "topk_ids" || name == "topk_logprobs"; }

/// Inputs and results on the device, mirrored in page-locked host memory. A step's results are packed by its size, so
/// that only they are copied. Logits are large and rarely needed: they have no mirror, and are copied separately.
class StepIO {
  public:
    StepIO() = default;

    /// Largest `rows`, `slots` and `outputs` of a step; `widths`: values for each prediction, by output.
    StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::map<std::string, std::int64_t> widths);

    /// Device address of each tensor of a step of `rows` rows and `outputs` predictions.
    std::map<std::string, Address> addresses(std::int64_t rows, std::int64_t outputs) const;

    /// Put the inputs on the stream. `input` may be reused at once, but not this object before the device is
    /// synchronized.
    void send(Device& device, const StepInput& input);

    /// Copy a step's results to `output`; waits for the stream. If the graph has top-k outputs, the lowest of equally
    /// likely ids is predicted, because TensorRT's TopK has no order among equal values.
    void fetch(Device& device, std::int64_t rows, std::int64_t outputs, bool want_logits, bool want_topk, StepOutput& output);

  private:
    /// Offset of each result, without logits.
    std::map<std::string, std::size_t> places(std::int64_t rows, std::int64_t outputs, std::size_t& end) const;

    std::map<std::string, std::size_t> given_;   // offset of each input
    std::map<std::string, std::int64_t> widths_; // of the results
    std::int64_t top_k_ = 0;
    unsigned char *here_ = nullptr, *there_ = nullptr;
    Address first_ = 0, last_ = 0, logits_ = 0;
};

} // namespace mars
