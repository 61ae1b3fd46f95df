// A captured run keeps what was bound to it, and a replay computes with that, whatever is bound by then.
#include "ort_stub/runs.hpp"

#include <cstdint>
#include <string>
#include <thread>
#include <utility>

namespace cuda_provider {

namespace {

bool is_live(const Tensor& tensor) {
    if (!tensor.is_there || tensor.copy) return true;
    auto at = state().memory.upper_bound(tensor.address);
    if (at == state().memory.begin()) return false;
    --at;
    return tensor.address + tensor.num_bytes <= at->first + at->second;
}

OrtStatus* compute(OrtSession* session, const OrtRunOptions* options, const Bound& inputs, const Bound& outputs) {
    const OrtApi& api = real();
    for (const Bound* bound : {&inputs, &outputs})
        for (const auto& [name, tensor] : *bound)
            if (!is_live(tensor)) return broken(name + " is in memory that was given back");
    OrtMemoryInfo* host = nullptr;
    OrtIoBinding* binding = nullptr;
    OrtStatus* status = api.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &host);
    if (status == nullptr) status = api.CreateIoBinding(session, &binding);
    const auto bind = [&](const Bound& bound, auto how) {
        for (const auto& [name, tensor] : bound) {
            if (status != nullptr) return;
            OrtValue* value = nullptr;
            status = api.CreateTensorWithDataAsOrtValue(host, tensor.address, tensor.num_bytes, tensor.shape.data(), tensor.shape.size(),
                                                        tensor.type, &value);
            if (status == nullptr) status = (api.*how)(binding, name.c_str(), value);
            api.ReleaseValue(value);
        }
    };
    bind(inputs, &OrtApi::BindInput);
    bind(outputs, &OrtApi::BindOutput);
    if (status == nullptr) status = api.RunWithBinding(session, options, binding);
    api.ReleaseIoBinding(binding);
    api.ReleaseMemoryInfo(host);
    return status;
}

OrtStatus* replay(OrtSession* session, const OrtRunOptions* options, const Binding& kept) {
    Bound outputs = kept.outputs;
    for (auto& [name, tensor] : outputs)
        if (!tensor.is_there) tensor.take(); // nobody copies it to the host
    return compute(session, options, kept.inputs, outputs);
}

} // namespace

OrtStatus* run(OrtSession* session, const OrtRunOptions* options, const Binding& bound) {
    OrtStub& said = state().said;
    Session& known = state().sessions[session];
    if (!known.captures) return compute(session, options, bound.inputs, bound.outputs);
    const auto given = state().numbers.find(options);
    if (given == state().numbers.end()) return broken("a run without a number is captured under 0, and replayed for every other");
    const std::int64_t number = given->second;
    if (number == -1) {
        said.runs.push_back({number, "plain"});
        return compute(session, options, bound.inputs, bound.outputs);
    }
    if (said.failing != 0 && said.runs.size() + 1 >= said.failing) return refused(said.failure);
    const std::pair key(std::this_thread::get_id(), number);
    const auto kept = known.kept.find(key);
    said.runs.push_back({number, kept == known.kept.end() ? "captured" : "replayed"});
    if (kept != known.kept.end()) return replay(session, options, kept->second);
    said.sizes.insert({bound.inputs.at("input_ids").shape[1], bound.inputs.at("output_index").shape[1]});
    for (int i = 0; i < 3; ++i)
        if (OrtStatus* status = compute(session, options, bound.inputs, bound.outputs)) return status;
    Binding& captured = known.kept[key] = bound;
    if (said.is_stale) captured.inputs.at("kv_length").take();
    return nullptr;
}

} // namespace cuda_provider
