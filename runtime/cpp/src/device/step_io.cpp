#include "device/step_io.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/pool.hpp"

namespace mars {

namespace {

template <typename T>
std::size_t num_bytes(const std::vector<T>& values) {
    return values.size() * sizeof(T);
}

void place(std::map<std::string, std::size_t>& places, const std::string& name, std::size_t size, std::size_t& end) {
    places[name] = end;
    end += (size + alignment - 1) / alignment * alignment;
}

/// Sort candidates of equal log-probability by id, and make the first of them the prediction.
void break_ties(StepOutput& output) {
    const auto width = static_cast<std::ptrdiff_t>(output.top_k);
    for (std::size_t at = 0; at < output.token_ids.size(); ++at) {
        const auto ids = output.topk_ids.begin() + static_cast<std::ptrdiff_t>(at) * width;
        const auto values = output.topk_logprobs.begin() + static_cast<std::ptrdiff_t>(at) * width;
        for (std::ptrdiff_t from = 0, to = 0; from < width; from = to) {
            for (to = from + 1; to < width && values[to] == values[from]; ++to) {
            }
            std::sort(ids + from, ids + to);
            if (from == 0 && to > 1) output.token_ids[at] = ids[0];
        }
    }
}

} // namespace

StepIO::StepIO(Device& device, std::int64_t rows, std::int64_t slots, std::int64_t outputs, std::map<std::string, std::int64_t> widths)
    : widths_(std::move(widths)) {
    std::size_t given = 0, fetched = 0;
    // The ids come last, so that unused slots are not sent.
    place(given_, "kv_length", bytes({rows, 8}), given);
    place(given_, "output_index", bytes({rows, outputs, 8}), given);
    place(given_, "input_ids", bytes({rows, slots, 8}), given);
    places(rows, outputs, fetched);
    here_ = device.pinned(given);
    there_ = device.pinned(fetched);
    first_ = device.allocate(given);
    last_ = device.allocate(fetched);
    if (const auto at = widths_.find("topk_ids"); at != widths_.end() && widths_.count("topk_logprobs") > 0) top_k_ = at->second;
    if (const auto at = widths_.find("logits"); at != widths_.end()) logits_ = device.allocate(bytes({rows, outputs, at->second, 4}));
}

std::map<std::string, std::size_t> StepIO::places(std::int64_t rows, std::int64_t outputs, std::size_t& end) const {
    std::map<std::string, std::size_t> all;
    for (const auto& [name, width] : widths_)
        if (name != "logits") place(all, name, bytes({rows, outputs, width, is_ids(name) ? 8 : 4}), end);
    return all;
}

std::map<std::string, Address> StepIO::addresses(std::int64_t rows, std::int64_t outputs) const {
    std::map<std::string, Address> all;
    std::size_t end = 0;
    for (const auto& [name, at] : given_) all[name] = first_ + at;
    for (const auto& [name, at] : places(rows, outputs, end)) all[name] = last_ + at;
    if (logits_ != 0) all["logits"] = logits_;
    return all;
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
    std::size_t end = 0;
    const std::map<std::string, std::size_t> got = places(rows, outputs, end);
    device.download(there_, last_, end);
    if (want_logits && logits_ != 0) {
        output.logits.resize(bytes({rows, outputs, widths_.at("logits")}));
        device.download(output.logits.data(), logits_, num_bytes(output.logits));
    }
    device.synchronize();
    const auto take = [&](const char* name, auto& values, std::int64_t width) {
        const auto at = got.find(name);
        if (at == got.end()) return;
        values.resize(bytes({rows, outputs, width}));
        if (!values.empty()) std::memcpy(values.data(), there_ + at->second, num_bytes(values));
    };
    take("token_ids", output.token_ids, 1);
    take("confidence", output.confidence, 1);
    take("margin", output.margin, 1);
    take("entropy", output.entropy, 1);
    output.top_k = top_k_;
    take("topk_ids", output.topk_ids, top_k_);
    take("topk_logprobs", output.topk_logprobs, top_k_);
    if (top_k_ > 0) break_ties(output);
    if (want_topk) return;
    output.top_k = 0;
    output.topk_ids.clear();
    output.topk_logprobs.clear();
}

} // namespace mars
