// What a step of an engine reads and gives, KV entries apart: packed, so that one copy each way carries it. Twin of runtime/device/trt/io.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/trt/cuda.hpp"

namespace mars {

/// Inputs and results on the device, and their mirror in page-locked host memory. The results of a step are packed by its size, so that one
/// copy fetches no more than there are. Logits are large and seldom wanted: they have no mirror, and a copy of their own.
class StepIO {
  public:
    StepIO() = default;

    /// The most `rows`, `slots` and `outputs` of a step; `widths`: values for each prediction of each output.
    StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::map<std::string, std::int64_t> widths);

    /// Where each tensor of a step of so many rows and predictions is on the device.
    std::map<std::string, Address> addresses(std::int64_t rows, std::int64_t outputs) const;

    /// Put the inputs on the stream; `input` may be used again at once, but not this, before the device is synchronized.
    void send(Device& device, const StepInput& input);

    /// Results of a step of so many rows and predictions into `output`; waits for the stream. Of equally likely tokens the lowest id wins
    /// where the engine gives top-k outputs: TensorRT's TopK has no order among equal values.
    void fetch(Device& device, std::int64_t rows, std::int64_t outputs, bool want_logits, bool want_topk, StepOutput& output);

  private:
    /// Where each result begins, logits apart.
    std::map<std::string, std::size_t> places(std::int64_t rows, std::int64_t outputs, std::size_t& end) const;

    std::map<std::string, std::size_t> given_;   // where each input begins
    std::map<std::string, std::int64_t> widths_; // of the results
    std::int64_t top_k_ = 0;
    unsigned char *here_ = nullptr, *there_ = nullptr;
    Address first_ = 0, last_ = 0, logits_ = 0;
};

} // namespace mars
