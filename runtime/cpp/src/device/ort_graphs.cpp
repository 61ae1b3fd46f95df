// Two blocks of memory for each captured step, and a table of them.
#include "device/ort_graphs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "device/filling.hpp"

namespace mars {

namespace {

constexpr std::size_t place_alignment = 256; // as the device's own allocations begin

std::size_t counted(std::int64_t number) { return static_cast<std::size_t>(number); }

bool are_ids(const std::string& name) { return name == "token_ids" || name == "topk_ids"; }

/// A place of `num_bytes` behind `end`.
std::size_t placed(std::size_t& end, std::size_t num_bytes) {
    const std::size_t at = end;
    end += (num_bytes + place_alignment - 1) / place_alignment * place_alignment;
    return at;
}

/// Of each row the first `kept` of `all` numbers that lie at `from`.
template <typename T>
void take_first(std::vector<T>& values, const unsigned char* from, std::int64_t rows, std::int64_t all, std::int64_t kept) {
    values.resize(counted(rows * kept));
    for (std::int64_t row = 0; row < rows; ++row)
        std::memcpy(values.data() + row * kept, from + counted(row * all) * sizeof(T), counted(kept) * sizeof(T));
}

} // namespace

CapturedStep::CapturedStep(std::shared_ptr<OrtMemory> memory, Ort::Session& session, std::int64_t number, const StepInput& input,
                           const std::vector<StepResult>& results)
    : binding(session), memory_(std::move(memory)), rows_(input.rows), outputs_(input.outputs) {
    using Shape = std::vector<std::int64_t>;
    options.AddConfigEntry(graph_number, std::to_string(number).c_str());
    const std::pair<const char*, Shape> inputs[] = {
        {"input_ids", {input.rows, input.slots}}, {"kv_length", {input.rows}}, {"output_index", {input.rows, input.outputs}}};
    const auto num_bytes = [](const Shape& shape, std::size_t each) {
        for (const std::int64_t dimension : shape) each *= counted(dimension);
        return each;
    };
    std::size_t given = 0, got = 0;
    for (const auto& [name, shape] : inputs) given_.push_back(placed(given, num_bytes(shape, sizeof(std::int64_t))));
    for (const auto& [name, width] : results) {
        const std::size_t each = are_ids(name) ? sizeof(std::int64_t) : sizeof(float);
        got_[name] = {placed(got, num_bytes({rows_, outputs_, width}, each)), width};
    }
    there_given_ = memory_->allocate(given);
    there_got_ = memory_->allocate(got);
    here_given_ = memory_->staging(given);
    here_got_ = memory_->staging(got);
    std::memset(here_given_.data(), 0, given); // what lies between the inputs is sent, too
    write(input);
    for (std::size_t i = 0; i < given_.size(); ++i)
        binding.BindInput(inputs[i].first,
                          memory_->tensor(there_given_.data() + given_[i], num_bytes(inputs[i].second, sizeof(std::int64_t)),
                                          inputs[i].second, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
    for (const auto& [name, width] : results) {
        const bool ids = are_ids(name), is_wide = name == "topk_ids" || name == "topk_logprobs";
        const Shape shape = is_wide ? Shape{rows_, outputs_, width} : Shape{rows_, outputs_};
        binding.BindOutput(name.c_str(), memory_->tensor(there_got_.data() + got_[name].first,
                                                         num_bytes(shape, ids ? sizeof(std::int64_t) : sizeof(float)), shape,
                                                         ids ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
    }
}

void CapturedStep::write(const StepInput& input) {
    const std::vector<std::int64_t>* values[] = {&input.input_ids, &input.kv_length, &input.output_index};
    for (std::size_t i = 0; i < given_.size(); ++i)
        std::memcpy(here_given_.data() + given_[i], values[i]->data(), values[i]->size() * sizeof(std::int64_t));
    memory_->upload(there_given_.data(), here_given_.data(), here_given_.size(), true);
}

void CapturedStep::read(std::int64_t outputs, StepOutput& output) {
    memory_->download(here_got_.data(), there_got_.data(), here_got_.size(), true);
    const auto take = [&](const char* name, auto& values) {
        const auto at = got_.find(name);
        if (at == got_.end()) return std::int64_t{0};
        const auto [begin, width] = at->second;
        take_first(values, here_got_.data() + begin, rows_, outputs_ * width, outputs * width);
        return width;
    };
    take("token_ids", output.token_ids);
    take("confidence", output.confidence);
    take("margin", output.margin);
    take("entropy", output.entropy);
    take("topk_ids", output.topk_ids);
    output.top_k = take("topk_logprobs", output.topk_logprobs);
    output.logits.clear();
}

OrtGraphs::OrtGraphs(std::int64_t block, double close) : sizes_{1, block, 2 * block - 1}, close_(close) {}

std::optional<StepInput> OrtGraphs::filled(const StepInput& input) const {
    const std::int64_t widest = *sizes_.rbegin();
    if (input.slots > widest || input.outputs > widest) return std::nullopt;
    return padded(input, input.rows, least_of(sizes_, input.slots, widest), least_of(sizes_, input.outputs, widest), 0);
}

std::shared_ptr<CapturedStep> OrtGraphs::find(const Key& key, const Bind& bind) {
    const auto at = steps_.find(key);
    if (at != steps_.end()) return at->second;
    if (seen_.count(key) == 0) {
        if (seen_.size() >= most_seen) seen_.clear();
        seen_.insert(key);
        return nullptr;
    }
    if (steps_.size() >= most) return nullptr;
    return steps_[key] = bind(static_cast<std::int64_t>(steps_.size()) + 1); // 0 is the provider's own
}

bool OrtGraphs::agree(const StepOutput& found, const StepOutput& right) const {
    const auto are_close = [&](const std::vector<float>& some, const std::vector<float>& others) {
        return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                          [&](float one, float other) { return std::abs(one - other) <= close_; });
    };
    return found.token_ids == right.token_ids && are_close(found.confidence, right.confidence) && are_close(found.margin, right.margin) &&
           are_close(found.entropy, right.entropy);
}

void OrtGraphs::give_up(const std::string& why) {
    const std::size_t begin = std::min(why.find_first_not_of(" \t\r\n"), why.size());
    reason_ = why.substr(begin, why.find_first_of("\r\n", begin) - begin);
    steps_.clear();
    seen_.clear();
}

std::size_t OrtGraphs::count() const {
    return static_cast<std::size_t>(std::count_if(steps_.begin(), steps_.end(), [](const auto& each) { return each.second->runs > 0; }));
}

} // namespace mars
