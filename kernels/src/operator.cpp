// The operators of this library for ONNX Runtime, in the domain `mars_export`. The exported graph has each of them as a function of standard
// operators, for sessions without this library.
#include <cstdlib>

#include "ort.hpp"

namespace mars::kernels {

const InstructionSet& chosen() { return choose(std::getenv("MARS_EXPORT_KERNELS")); }

Packed packed_weights(const OrtKernelInfo* info, size_t index, size_t part, size_t parts) {
    const Ort::ConstKernelInfo kernel(info);
    int weight_is_constant = 0, scale_is_constant = 0;
    const auto weight = kernel.GetTensorConstantInput(index, &weight_is_constant);
    const auto scale = kernel.GetTensorConstantInput(index + 1, &scale_is_constant);
    require(weight_is_constant && scale_is_constant, "weight and scale must be initializers", ORT_INVALID_GRAPH);
    const auto shape = weight.GetTensorTypeAndShapeInfo().GetShape();
    require(shape.size() == 2 && shape[0] > 0 && shape[0] <= 4 * 65535 &&
                scale.GetTensorTypeAndShapeInfo().GetShape() == std::vector{shape[1]} && shape[1] % static_cast<int64_t>(parts) == 0,
            "weight must be [inputs, outputs], with at most 262140 inputs, and scale [outputs]", ORT_INVALID_GRAPH);
    const auto inputs = static_cast<size_t>(shape[0]), outputs = static_cast<size_t>(shape[1]), columns = outputs / parts;
    const auto* codes = weight.GetTensorData<int8_t>() + part * columns;
    const auto* scales = scale.GetTensorData<float>() + part * columns;
    if (parts == 1) return {chosen(), codes, scales, inputs, outputs};
    std::vector<int8_t> copy(inputs * columns);
    for (size_t i = 0; i < inputs; ++i) std::copy_n(codes + i * outputs, columns, copy.data() + i * columns);
    return {chosen(), copy.data(), scales, inputs, columns};
}

namespace {

constexpr uint32_t OLDEST_API = 1; // which every ONNX Runtime has

// x [..., inputs] times weight [inputs, outputs] int8, with a scale for each output
struct QuantizedMatMul {
    static constexpr const char* NAME = "QuantizedMatMul";
    static constexpr std::string_view INPUTS = "fbf"; // x, weight, scale
    static constexpr std::string_view OUTPUTS = "f";

    const Packed weights;

    explicit QuantizedMatMul(const OrtKernelInfo* info) : weights(packed_weights(info, 1)) {}

    void compute(const Ort::KernelContext& context) const {
        const auto x = context.GetInput(0);
        auto shape = x.GetTensorTypeAndShapeInfo().GetShape();
        require(!shape.empty() && shape.back() == static_cast<int64_t>(weights.inputs),
                "QuantizedMatMul: the last axis of x must be the weight's inputs");
        const size_t rows = x.GetTensorTypeAndShapeInfo().GetElementCount() / weights.inputs;
        shape.back() = static_cast<int64_t>(weights.outputs);
        float* out = context.GetOutput(0, shape).GetTensorMutableData<float>();
        const Threads threads{context};
        multiply(codes_of(weights, x.GetTensorData<float>(), rows, threads), {{weights, out}}, threads);
    }
};

} // namespace

} // namespace mars::kernels

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept
    try {
    const OrtApi* const api = base->GetApi(ORT_API_VERSION);
    if (!api)
        return base->GetApi(mars::kernels::OLDEST_API)
            ->CreateStatus(ORT_FAIL, "mars-export-kernels was built with the headers of a newer ONNX Runtime: update onnxruntime, or set "
                                     "MARS_EXPORT_KERNELS=0");
    Ort::InitApi(api);
    static const mars::kernels::Operator<mars::kernels::QuantizedMatMul> product;
    static const Ort::CustomOpDomain domain = [] {
        Ort::CustomOpDomain made("mars_export");
        for (const OrtCustomOp* added : {static_cast<const OrtCustomOp*>(&product), mars::kernels::layer_start(),
                                         mars::kernels::layer_end(), mars::kernels::attention()})
            made.Add(added);
        return made;
    }();
    return Ort::GetApi().AddCustomOpDomain(options, domain);
} catch (const std::exception& error) {
    return Ort::Status(error).release();
}

extern "C" __attribute__((visibility("default"))) const char* mars_export_kernels_instructions() { return mars::kernels::chosen().name; }
