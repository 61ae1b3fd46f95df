#include "device/ort/step.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

} // namespace

template <typename T>
Ort::Value OrtStep::tensor(const std::vector<T>& values, const Shape& shape) const {
    // ONNX Runtime writes to outputs only; its API has no const tensors.
    return Ort::Value::CreateTensor<T>(host, const_cast<T*>(values.data()), values.size(), shape.data(), shape.size());
}

void OrtStep::bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const {
    const OrtSignature& is = signature;
    const Shape shape{count, is.kv_heads, rows.capacity(), is.head_dim};
    const auto num_bytes = static_cast<std::size_t>(count * rows.row_bytes());
    for (std::size_t i = 0; i < is.past_names.size(); ++i) {
        const Ort::Value kv = Ort::Value::CreateTensor(rows_info, rows.at(i, first), num_bytes, shape.data(), shape.size(), is.kv_type);
        rows.binding.BindInput(is.past_names[i].c_str(), kv);
        rows.binding.BindOutput(is.present_names[i].c_str(), kv);
    }
}

template <typename T>
void OrtStep::bind_result(OrtRows& rows, const std::string& name, std::vector<T>& values, const Shape& shape) const {
    std::size_t size = 1;
    for (const std::int64_t dimension : shape) size *= static_cast<std::size_t>(dimension);
    values.resize(size);
    rows.binding.BindOutput(name.c_str(), tensor(values, shape));
}

void OrtStep::bind_results(OrtRows& rows, const StepInput& input, bool want_logits, StepOutput& output) const {
    for (const std::string& name : signature.outputs) {
        const Shape shape{input.rows, input.outputs}, topk{input.rows, input.outputs, top_k};
        if (name == "token_ids") bind_result(rows, name, output.token_ids, shape);
        if (name == "confidence") bind_result(rows, name, output.confidence, shape);
        if (name == "margin") bind_result(rows, name, output.margin, shape);
        if (name == "entropy") bind_result(rows, name, output.entropy, shape);
        // outputs that are not bound are not computed
        if (name == "topk_ids" && input.want_topk) bind_result(rows, name, output.topk_ids, topk);
        if (name == "topk_logprobs" && input.want_topk) {
            bind_result(rows, name, output.topk_logprobs, topk);
            output.top_k = top_k;
        }
        if (name == "logits" && want_logits) bind_result(rows, name, output.logits, {input.rows, input.outputs, signature.vocab_size});
    }
    if (!want_logits) output.logits.clear();
    if (!input.want_topk) output.top_k = 0;
}

void OrtStep::run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    const Shape layout{first, input.rows, rows.capacity(), want_logits ? 1 : 0, input.want_topk ? 1 : 0};
    if (rows.bound != layout || !are_rows_bound_once) {
        rows.binding.ClearBoundOutputs();
        rows.bound.clear(); // a failed binding must not count as bound
        bind_kv(rows, first, input.rows);
        rows.bound = layout;
    }
    rows.binding.BindInput("input_ids", tensor(input.input_ids, {input.rows, input.slots}));
    rows.binding.BindInput("kv_length", tensor(input.kv_length, {input.rows}));
    rows.binding.BindInput("output_index", tensor(input.output_index, {input.rows, input.outputs}));
    bind_results(rows, input, want_logits, output);
    const auto begun = std::chrono::steady_clock::now();
    opened->session.Run(Ort::RunOptions(), rows.binding);
    run_time += (std::chrono::steady_clock::now() - begun).count();
}

std::unique_ptr<OrtRows> OrtStep::new_rows(std::int64_t num_rows) const {
    const OrtSignature& is = signature;
    return std::make_unique<OrtRows>(memory, opened->session, is.past_names.size(), num_rows, is.kv_heads, is.head_dim * element_bytes);
}

} // namespace mars
