// The operators for ONNX Runtime, in the domain `mars_export`. The exported graph has each of them as a function of standard
// operators, for sessions without them.
#include "operators.hpp"

#include <cstdlib>

#include "memory.hpp"
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
    Packed packed(chosen(), codes, outputs, scales, inputs, columns);
    drop_file_pages(weight.GetTensorData<int8_t>(), inputs * outputs);
    return packed;
}

namespace {

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

void add_operators(OrtSessionOptions* options) {
    static const Operator<QuantizedMatMul> product;
    static const Ort::CustomOpDomain domain = [] {
        Ort::CustomOpDomain made("mars_export");
        for (const OrtCustomOp* added : {static_cast<const OrtCustomOp*>(&product), layer_start(), layer_end(), attention()})
            made.Add(added);
        return made;
    }();
    Ort::ThrowOnError(Ort::GetApi().AddCustomOpDomain(options, domain));
}

const char* instructions() { return chosen().name; }

} // namespace mars::kernels
