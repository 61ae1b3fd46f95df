// Places of tensors in two blocks, and the two copies.
#include "device/step_io.hpp"

#include <cstring>
#include <utility>

#include "device/kv_pool.hpp"

namespace mars {

namespace {

bool is_ids(const std::string& name) { return name == "token_ids" || name == "topk_ids"; }

template <typename T>
std::size_t num_bytes(const std::vector<T>& values) {
    return values.size() * sizeof(T);
}

} // namespace

StepIO::StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs,
               const std::map<std::string, std::int64_t>& widths) {
    std::size_t given = 0, fetched = 0, kept = 0;
    const auto place = [](std::map<std::string, std::size_t>& places, const std::string& name, std::size_t size, std::size_t& end) {
        places[name] = end;
        end += (size + alignment - 1) / alignment * alignment;
    };
    // The ids come last: what is behind those of this step is not sent.
    place(given_, "kv_length", bytes({rows, 8}), given);
    place(given_, "output_index", bytes({rows, outputs, 8}), given);
    place(given_, "input_ids", bytes({rows, slots, 8}), given);
    std::map<std::string, std::size_t> stay;
    for (const auto& [name, width] : widths) {
        const std::size_t size = bytes({rows, outputs, width, is_ids(name) ? 8 : 4});
        if (name == "logits" || name == "topk_ids" || name == "topk_logprobs")
            place(stay, name, size, kept);
        else
            place(got_, name, size, fetched);
        if (name == "logits") vocab_size_ = width;
    }
    got_size_ = fetched;
    here_ = device.pinned(given);
    there_ = device.pinned(fetched);
    first_ = device.allocate(given);
    last_ = device.allocate(fetched);
    for (const auto& [name, at] : given_) addresses_[name] = first_ + at;
    for (const auto& [name, at] : got_) addresses_[name] = last_ + at;
    if (stay.empty()) return;
    const Address third = device.allocate(kept);
    for (const auto& [name, at] : stay) addresses_[name] = third + at;
}

void StepIO::send(Device& device, const StepInput& input) {
    const auto put = [&](const char* name, const std::vector<std::int64_t>& values) {
        std::memcpy(here_ + given_.at(name), values.data(), num_bytes(values));
    };
    put("kv_length", input.kv_length);
    put("output_index", input.output_index);
    put("input_ids", input.input_ids);
    device.upload(first_, here_, given_.at("input_ids") + num_bytes(input.input_ids));
}

void StepIO::fetch(Device& device, std::int64_t rows, std::int64_t outputs, bool want_logits, StepOutput& output) {
    device.download(there_, last_, got_size_);
    if (want_logits && vocab_size_ > 0) {
        output.logits.resize(bytes({rows, outputs, vocab_size_}));
        device.download(output.logits.data(), addresses_.at("logits"), num_bytes(output.logits));
    }
    device.synchronize();
    const auto take = [&](const char* name, auto& values) {
        const auto at = got_.find(name);
        if (at == got_.end()) return;
        values.resize(bytes({rows, outputs}));
        std::memcpy(values.data(), there_ + at->second, num_bytes(values));
    };
    take("token_ids", output.token_ids);
    take("confidence", output.confidence);
    take("margin", output.margin);
    take("entropy", output.entropy);
}

} // namespace mars
