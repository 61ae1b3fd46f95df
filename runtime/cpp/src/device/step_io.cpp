// Places of tensors in two blocks, and the two copies.
#include "device/step_io.hpp"

#include <cstring>
#include <utility>

#include "device/kv_pool.hpp"

namespace mars {

namespace {

bool is_top_k(const std::string& name) { return name == "topk_ids" || name == "topk_logprobs"; }

bool is_ids(const std::string& name) { return name == "token_ids" || name == "topk_ids"; }

template <typename T>
std::size_t num_bytes(const std::vector<T>& values) {
    return values.size() * sizeof(T);
}

} // namespace

StepIO::StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs,
               const std::map<std::string, std::int64_t>& widths) {
    std::size_t given = 0, fetched = 0;
    const auto place = [](std::map<std::string, std::size_t>& places, const std::string& name, std::size_t size, std::size_t& end) {
        places[name] = end;
        end += (size + alignment - 1) / alignment * alignment;
    };
    // The ids come last: what is behind those of this step is not sent.
    place(given_, "kv_length", bytes({rows, 8}), given);
    place(given_, "output_index", bytes({rows, outputs, 8}), given);
    place(given_, "input_ids", bytes({rows, slots, 8}), given);
    const auto size_of = [&](const auto& each) { return bytes({rows, outputs, each.second, is_ids(each.first) ? 8 : 4}); };
    for (const auto& each : widths)
        if (each.first != "logits" && !is_top_k(each.first)) place(got_, each.first, size_of(each), fetched);
    narrow_size_ = fetched;
    for (const auto& each : widths) {
        if (!is_top_k(each.first)) continue;
        place(got_, each.first, size_of(each), fetched);
        top_k_ = each.second;
    }
    got_size_ = fetched;
    here_ = device.pinned(given);
    there_ = device.pinned(fetched);
    first_ = device.allocate(given);
    last_ = device.allocate(fetched);
    for (const auto& [name, at] : given_) addresses_[name] = first_ + at;
    for (const auto& [name, at] : got_) addresses_[name] = last_ + at;
    const auto logits = widths.find("logits");
    if (logits == widths.end()) return;
    vocab_size_ = logits->second;
    addresses_["logits"] = device.allocate(size_of(*logits));
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

void StepIO::fetch(Device& device, std::int64_t rows, std::int64_t outputs, bool want_logits, bool want_topk, StepOutput& output) {
    device.download(there_, last_, want_topk ? got_size_ : narrow_size_);
    if (want_logits && vocab_size_ > 0) {
        output.logits.resize(bytes({rows, outputs, vocab_size_}));
        device.download(output.logits.data(), addresses_.at("logits"), num_bytes(output.logits));
    }
    device.synchronize();
    const auto take = [&](const char* name, auto& values, std::int64_t width) {
        const auto at = got_.find(name);
        if (at == got_.end()) return;
        values.resize(bytes({rows, outputs, width}));
        if (!values.empty()) std::memcpy(values.data(), there_ + at->second, num_bytes(values));
    };
    take("token_ids", output.token_ids, 1);
    take("confidence", output.confidence, 1);
    take("margin", output.margin, 1);
    take("entropy", output.entropy, 1);
    output.top_k = want_topk ? top_k_ : 0;
    take("topk_ids", output.topk_ids, output.top_k);
    take("topk_logprobs", output.topk_logprobs, output.top_k);
}

} // namespace mars
