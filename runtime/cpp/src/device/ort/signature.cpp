// runtime/device/ort/binding.py: the names and sizes that a step graph must have by the manifest.
#include <algorithm>
#include <set>

#include <mars/errors.hpp>

#include "device/ort/backend.hpp"
#include "joined.hpp"

namespace mars {

void OrtBackend::check_signature(const std::filesystem::path& file) {
    using Shape = std::vector<std::int64_t>;
    std::set<std::string> missing{"input_ids", "kv_length", "output_index"}, odd;
    for (const auto* names : {&past_names_, &present_names_, &outputs_}) missing.insert(names->begin(), names->end());
    Ort::AllocatorWithDefaultOptions allocator;
    const auto check = [&](const std::string& name, const Ort::TypeInfo& type) {
        if (missing.erase(name) == 0) odd.insert(name);
        const bool is_tensor = type.GetONNXType() == ONNX_TYPE_TENSOR;
        const Shape shape = is_tensor ? type.GetTensorTypeAndShapeInfo().GetShape() : Shape{};
        if (begins_with(name, "past_key_values.") || begins_with(name, "present.")) {
            if (shape.size() != 4 || shape[1] != model_.num_kv_heads || shape[3] != entry_width() ||
                type.GetTensorTypeAndShapeInfo().GetElementType() != kv_type_)
                odd.insert(name);
        } else if (name == "logits" && (shape.size() != 3 || shape[2] != model_.vocab_size)) {
            odd.insert(name);
        } else if (name == "topk_ids" || name == "topk_logprobs") {
            if (shape.size() != 3 || shape[2] < 1 || shape[2] > model_.vocab_size || (top_k_ != 0 && shape[2] != top_k_)) odd.insert(name);
            top_k_ = shape.size() == 3 ? shape[2] : 0;
        }
    };
    const Ort::Session& session = graph_.session;
    for (std::size_t i = 0; i < session.GetInputCount(); ++i)
        check(session.GetInputNameAllocated(i, allocator).get(), session.GetInputTypeInfo(i));
    for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
        check(session.GetOutputNameAllocated(i, allocator).get(), session.GetOutputTypeInfo(i));
    odd.insert(missing.begin(), missing.end());
    if (odd.empty()) return;
    std::vector<std::string> names(odd.begin(), odd.end());
    names.resize(std::min(names.size(), std::size_t{6}));
    throw BundleError(file.string() + ": the graph and the manifest disagree about " + joined(names) + "; export again");
}

} // namespace mars
