#include "device/ort/options.hpp"

#include <mars/errors.hpp>

namespace mars {

namespace {

constexpr const char* level = "session.qdq_matmulnbits_accuracy_level"; // profiles are checked against it

}

OrtParts parted(const OrtOptions& options, bool on_cpu, std::optional<int> number) {
    OrtParts parts;
    std::string odd;
    for (const auto& [name, value] : options) {
        if (name == level) throw SessionError(name + " cannot be set: the variant determines it");
        if (!on_cpu && (name == "enable_cuda_graph" || name == "trt_cuda_graph_enable"))
            throw SessionError(name +
                               " cannot be set: it would replay the first step for all others; use a TensorRT engine to capture steps");
        const bool is_entry = name.find('.') != std::string::npos;
        (is_entry ? parts.entries : parts.of_provider)[name] = value;
        if (!is_entry) odd += (odd.empty() ? "" : ", ") + name;
    }
    if (on_cpu && !odd.empty())
        throw SessionError("the CPU has no option " + odd +
                           "; names of ONNX Runtime's own have a dot, such as session.intra_op.allow_spinning");
    if (!number) return parts;
    const std::string& said = parts.of_provider.emplace("device_id", std::to_string(*number)).first->second;
    if (said != std::to_string(*number))
        throw SessionError("the device has number " + std::to_string(*number) + " and device_id is " + said.substr(0, 60) +
                           "; say it once, in the device");
    return parts;
}

} // namespace mars
