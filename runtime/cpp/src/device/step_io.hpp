// What a step of an engine reads and gives, KV entries apart: packed, so that one copy each way carries it. Twin of runtime/device/trt_io.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/cuda.hpp"

namespace mars {

/// Inputs and results on the device, and their mirror in page-locked host memory. Logits are large and seldom wanted: they have no mirror, and
/// a copy of their own. What a grammar chooses from, topk_ids and topk_logprobs, lies behind the other results and is fetched with them where
/// a step wants it.
class StepIO {
  public:
    StepIO() = default;

    /// The most `rows`, `slots` and `outputs` of a step; `widths`: values for each prediction of each output.
    StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs, const std::map<std::string, std::int64_t>& widths);

    /// Where each tensor is on the device.
    const std::map<std::string, Address>& addresses() const { return addresses_; }

    /// Put the inputs on the stream; `input` may be used again at once, but not this, before the device is synchronized.
    void send(Device& device, const StepInput& input);

    /// Results of a step of so many rows and predictions into `output`; waits for the stream.
    void fetch(Device& device, std::int64_t rows, std::int64_t outputs, bool want_logits, bool want_topk, StepOutput& output);

  private:
    std::map<std::string, std::size_t> given_, got_; // where each begins in its block
    std::map<std::string, Address> addresses_;
    std::int64_t vocab_size_ = 0, top_k_ = 0;
    std::size_t got_size_ = 0, narrow_size_ = 0; // of all results, and of those in front of the top-k
    unsigned char *here_ = nullptr, *there_ = nullptr;
    Address first_ = 0, last_ = 0;
};

} // namespace mars
