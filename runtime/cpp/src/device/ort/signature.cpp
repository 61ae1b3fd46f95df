// runtime/device/ort/signature.py: the names and sizes that a step graph must have by the manifest.
#include <algorithm>
#include <set>

#include <mars/errors.hpp>

#include "device/ort/open.hpp"
#include "joined.hpp"

namespace mars {

KvTensor::KvTensor(const ModelInfo& model, const Variant& variant)
    : heads(model.entry_shape(variant.kv_dtype, variant.kv_layout).first),
      width(model.entry_shape(variant.kv_dtype, variant.kv_layout).second), is_flat(variant.kv_layout == "cuda") {
    if (variant.kv_layout == "appended" || (variant.kv_dtype != "float32" && variant.kv_dtype != "float16" && variant.kv_dtype != "int8"))
        throw SessionError("variant " + variant.name + ": KV layout " + variant.kv_layout + " in " + variant.kv_dtype +
                           " does not run on ONNX Runtime");
    if (variant.kv_dtype == "int8") type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, item = 1;
    if (variant.kv_dtype == "float16") type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, item = 2;
}

std::vector<std::int64_t> KvTensor::shape(std::int64_t rows, std::int64_t capacity) const {
    return is_flat ? std::vector{rows, capacity, width} : std::vector{rows, heads, capacity, width};
}

std::map<std::string, std::int64_t> check_signature(const Ort::Session& session, const std::filesystem::path& file, const Variant& variant,
                                                    const ModelInfo& model) {
    using Shape = std::vector<std::int64_t>;
    const KvTensor kv(model, variant);
    std::map<std::string, std::pair<Shape, ONNXTensorElementDataType>> forms; // of pasts and presents, by suffix
    for (const std::string& suffix : model.kv_suffixes()) forms[suffix] = {kv.shape(-1, -1), kv.type};
    std::set<std::string> missing{"input_ids", "kv_length", "output_index"}, odd;
    if (model.recurrent) {
        missing.insert("state_length");
        for (auto& [suffix, shape] : model.recurrent->shapes(0)) {
            if (shape.size() == 2) shape.front() = -1; // entries
            shape.insert(shape.begin(), -1);
            forms[suffix] = {shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT};
        }
    }
    missing.insert(variant.outputs.begin(), variant.outputs.end());
    for (const auto& [suffix, form] : forms) missing.insert({"past_key_values." + suffix, "present." + suffix});
    std::map<std::string, std::int64_t> widths;
    for (const std::string& name : variant.outputs) widths[name] = 1;
    std::int64_t top_k = 0;
    Ort::AllocatorWithDefaultOptions allocator;
    const auto check = [&](const std::string& name, const Ort::TypeInfo& type) {
        if (missing.erase(name) == 0) odd.insert(name);
        const bool is_tensor = type.GetONNXType() == ONNX_TYPE_TENSOR;
        const Shape shape = is_tensor ? type.GetTensorTypeAndShapeInfo().GetShape() : Shape{};
        std::vector<const char*> symbols(shape.size());
        if (is_tensor) type.GetTensorTypeAndShapeInfo().GetSymbolicDimensions(symbols.data(), symbols.size());
        const bool is_kept = begins_with(name, "past_key_values.") || begins_with(name, "present.");
        if (model.mtp_drafts > 0 && widths.count(name) > 0 &&
            (shape.size() < 2 || symbols[1] != "outputs_and_" + std::to_string(model.mtp_drafts) + "_drafts"))
            odd.insert(name);
        if (const auto form = is_kept ? forms.find(name.substr(name.find('.') + 1)) : forms.end(); form != forms.end()) {
            const auto& [wanted, kind] = form->second;
            const auto fits = [](std::int64_t wants, std::int64_t has) { return wants < 0 || wants == has; };
            const auto info = type.GetTensorTypeAndShapeInfo();
            // Of the inputs of recurrent layers: those of a step's outputs, and those before them.
            const bool has_width =
                !model.recurrent || shape.size() != 3 || symbols[1] == "outputs_and_" + std::to_string(model.recurrent->width);
            if (!has_width || !std::equal(wanted.begin(), wanted.end(), shape.begin(), shape.end(), fits) || info.GetElementType() != kind)
                odd.insert(name);
        } else if (name == "logits" || name == "topk_ids" || name == "topk_logprobs") {
            const std::int64_t width = shape.size() == 3 ? shape[2] : 0, most = model.vocab_size;
            if (width < 1 || width > most || (name == "logits" ? width != most : top_k != 0 && width != top_k)) odd.insert(name);
            if (name != "logits") top_k = width;
            widths[name] = width;
        }
    };
    for (std::size_t i = 0; i < session.GetInputCount(); ++i)
        check(session.GetInputNameAllocated(i, allocator).get(), session.GetInputTypeInfo(i));
    for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
        check(session.GetOutputNameAllocated(i, allocator).get(), session.GetOutputTypeInfo(i));
    odd.insert(missing.begin(), missing.end());
    if (odd.empty()) return widths;
    std::vector<std::string> names(odd.begin(), odd.end());
    names.resize(std::min(names.size(), std::size_t{6}));
    throw BundleError(file.string() + ": the graph and the manifest disagree about " + joined(names) + "; export again");
}

} // namespace mars
