// Binding by address; what ONNX Runtime would send or fetch is as small as it can be.
#include "device/ort_step.hpp"

#include <cstring>

#include "device/ort_graphs.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::size_t staged_alignment = 64;

} // namespace

template <typename T>
Ort::Value OrtStep::tensor(Way& way, const std::vector<T>& values, const Shape& shape, bool is_result) const {
    // ONNX Runtime writes through outputs only; its API has no const tensors.
    auto* data = const_cast<T*>(values.data());
    if (way.next == nullptr) return Ort::Value::CreateTensor<T>(host, data, values.size(), shape.data(), shape.size());
    const std::size_t num_bytes = values.size() * sizeof(T);
    unsigned char* staged = way.next;
    way.next += (num_bytes + staged_alignment - 1) / staged_alignment * staged_alignment;
    if (is_result)
        way.results.push_back({reinterpret_cast<unsigned char*>(data), staged, num_bytes});
    else
        std::memcpy(staged, data, num_bytes);
    (is_result ? memory->fetched : memory->sent) += num_bytes;
    return memory->host_tensor(staged, num_bytes, shape, Ort::TypeToTensorType<T>::type);
}

OrtStep::Way OrtStep::way(OrtRows& rows, const StepInput& input, bool want_logits) const {
    if (!memory) return {};
    const std::int64_t width = 5 + (input.want_topk ? 2 * top_k : 0) + (want_logits ? signature.vocab_size : 0); // numbers of a prediction
    const auto numbers = static_cast<std::size_t>(input.rows * (input.slots + 1 + input.outputs * (1 + width)));
    return {dynamic_cast<DeviceRows&>(rows).staging(8 * numbers + staged_alignment * (3 + signature.outputs.size())), {}};
}

void OrtStep::bind_kv(Ort::IoBinding& binding, OrtRows& rows, std::int64_t first, std::int64_t count) const {
    const OrtSignature& is = signature;
    const Shape shape{count, is.kv_heads, rows.capacity(), is.head_dim};
    const auto num_bytes = static_cast<std::size_t>(count * rows.row_bytes());
    for (std::size_t i = 0; i < is.past_names.size(); ++i) {
        unsigned char* data = rows.at(i, first);
        const Ort::Value kv = memory ? memory->tensor(data, num_bytes, shape, is.kv_type)
                                     : Ort::Value::CreateTensor(host, data, num_bytes, shape.data(), shape.size(), is.kv_type);
        binding.BindInput(is.past_names[i].c_str(), kv);
        binding.BindOutput(is.present_names[i].c_str(), kv);
    }
}

template <typename T>
void OrtStep::bind_result(OrtRows& rows, Way& way, const std::string& name, std::vector<T>& values, const Shape& shape) const {
    std::size_t size = 1;
    for (const std::int64_t dimension : shape) size *= static_cast<std::size_t>(dimension);
    values.resize(size);
    rows.binding.BindOutput(name.c_str(), tensor(way, values, shape, true));
}

void OrtStep::bind_results(OrtRows& rows, Way& way, const StepInput& input, bool want_logits, StepOutput& output) const {
    for (const std::string& name : signature.outputs) {
        const Shape shape{input.rows, input.outputs}, topk{input.rows, input.outputs, top_k};
        if (name == "token_ids") bind_result(rows, way, name, output.token_ids, shape);
        if (name == "confidence") bind_result(rows, way, name, output.confidence, shape);
        if (name == "margin") bind_result(rows, way, name, output.margin, shape);
        if (name == "entropy") bind_result(rows, way, name, output.entropy, shape);
        // What is not bound is not computed.
        if (name == "topk_ids" && input.want_topk) bind_result(rows, way, name, output.topk_ids, topk);
        if (name == "topk_logprobs" && input.want_topk) {
            bind_result(rows, way, name, output.topk_logprobs, topk);
            output.top_k = top_k;
        }
        if (name == "logits" && want_logits) bind_result(rows, way, name, output.logits, {input.rows, input.outputs, signature.vocab_size});
    }
    if (!want_logits) output.logits.clear();
    if (!input.want_topk) output.top_k = 0;
}

void OrtStep::run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    Scratch::Step step = scratch ? scratch->step(input.rows, input.slots, rows.capacity(), input.outputs) : Scratch::Step();
    const Shape layout{first, input.rows, rows.capacity(), want_logits ? 1 : 0, input.want_topk ? 1 : 0};
    // Another device gets a copy of a host tensor when it is bound, so rows in host memory must be bound at every step there, and inputs
    // always: binding is what sends them.
    if (rows.bound != layout || (!on_cpu && !memory)) {
        rows.binding.ClearBoundOutputs();
        rows.bound.clear(); // a binding that fails half-way stands for nothing
        bind_kv(rows.binding, rows, first, input.rows);
        rows.bound = layout;
    }
    Way sending = way(rows, input, want_logits);
    rows.binding.BindInput("input_ids", tensor(sending, input.input_ids, {input.rows, input.slots}, false));
    rows.binding.BindInput("kv_length", tensor(sending, input.kv_length, {input.rows}, false));
    rows.binding.BindInput("output_index", tensor(sending, input.output_index, {input.rows, input.outputs}, false));
    bind_results(rows, sending, input, want_logits, output);
    compute(rows.options, rows.binding);
    step.ran();
    for (const Way::Result& result : sending.results) std::memcpy(result.target, result.source, result.num_bytes);
}

void OrtStep::compute(const Ort::RunOptions& options, const Ort::IoBinding& binding) {
    const auto begun = std::chrono::steady_clock::now();
    opened->session.Run(options, binding);
    run_time += (std::chrono::steady_clock::now() - begun).count();
}

std::unique_ptr<OrtRows> OrtStep::new_rows(std::int64_t num_rows) const {
    const OrtSignature& is = signature;
    std::unique_ptr<OrtRows> rows;
    if (memory)
        rows =
            std::make_unique<DeviceRows>(memory, opened->session, is.past_names.size(), num_rows, is.kv_heads, is.head_dim * element_bytes);
    else
        rows = std::make_unique<HostRows>(opened->session, is.past_names.size(), num_rows, is.kv_heads, is.head_dim * element_bytes);
    if (worker) rows->options.AddConfigEntry(graph_number, plain_number); // without a number a run is captured under 0
    return rows;
}

} // namespace mars
