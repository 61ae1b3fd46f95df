// The operators for ONNX Runtime, in the domain `mars_export`. The exported graph has each of them as a function of standard
// operators, for sessions without them.
#include "operators.hpp"

#include <cstdlib>

#include "memory.hpp"
#include "ort.hpp"

namespace mars::kernels {

const InstructionSet& chosen() { return choose(std::getenv("MARS_EXPORT_KERNELS")); }

namespace {

using Shape = std::vector<int64_t>;

Ort::ConstValue initializer(const OrtKernelInfo* info, size_t index) {
    int is_constant = 0;
    const Ort::ConstValue value = Ort::ConstKernelInfo(info).GetTensorConstantInput(index, &is_constant);
    require(is_constant, "weights and scales must be initializers", ORT_INVALID_GRAPH);
    return value;
}

Shape shape_of(const Ort::ConstValue& value) { return value.GetTensorTypeAndShapeInfo().GetShape(); }

} // namespace

Packed packed_weights(const OrtKernelInfo* info, size_t index, size_t part, size_t parts) {
    const auto weight = initializer(info, index), scale = initializer(info, index + 1);
    const Shape shape = shape_of(weight);
    require(shape.size() == 2 && shape[0] > 0 && shape[0] <= 4 * 65535 && shape_of(scale) == Shape{shape[1]} &&
                shape[1] % static_cast<int64_t>(parts) == 0,
            "weight must be [inputs, outputs], with at most 262140 inputs, and scale [outputs]", ORT_INVALID_GRAPH);
    const auto inputs = static_cast<size_t>(shape[0]), outputs = static_cast<size_t>(shape[1]), columns = outputs / parts;
    const auto* codes = weight.GetTensorData<int8_t>() + part * columns;
    const auto* scales = scale.GetTensorData<float>() + part * columns;
    Packed packed(chosen(), codes, outputs, scales, inputs, columns);
    drop_file_pages(weight.GetTensorData<int8_t>(), inputs * outputs);
    return packed;
}

namespace {

// The product of an operator's first input.
void multiply(const Ort::KernelContext& context, const Packed& weights, const char* error) {
    const auto x = context.GetInput(0);
    Shape shape = shape_of(x);
    require(!shape.empty() && shape.back() == static_cast<int64_t>(weights.inputs), error);
    const size_t rows = x.GetTensorTypeAndShapeInfo().GetElementCount() / weights.inputs;
    shape.back() = static_cast<int64_t>(weights.outputs);
    multiply(weights, x.GetTensorData<float>(), rows, context.GetOutput(0, shape).GetTensorMutableData<float>(), Threads{context});
}

// x [..., inputs] times weight [inputs, outputs] int8, with a scale for each output
struct QuantizedMatMul {
    static constexpr const char* NAME = "QuantizedMatMul";
    static constexpr std::string_view INPUTS = "fbf"; // x, weight, scale
    static constexpr std::string_view OUTPUTS = "f";

    const Packed weights;

    explicit QuantizedMatMul(const OrtKernelInfo* info) : weights(packed_weights(info, 1)) {}

    void compute(const Ort::KernelContext& context) const {
        multiply(context, weights, "QuantizedMatMul: the last axis of x must be the weight's inputs");
    }
};

// x [..., inputs] times weight [inputs, outputs] uint4, which is scale * multiplier * (weight - zero point)
struct GroupedMatMul {
    static constexpr const char* NAME = "GroupedMatMul";
    static constexpr std::string_view INPUTS = "f44uf"; // x, weight, its zero points, multipliers and scale
    static constexpr std::string_view OUTPUTS = "f";

    const Packed weights;

    explicit GroupedMatMul(const OrtKernelInfo* info) : weights(packed(info)) {}

    static Packed packed(const OrtKernelInfo* info) {
        const auto weight = initializer(info, 1), zeros = initializer(info, 2), multipliers = initializer(info, 3),
                   scale = initializer(info, 4);
        constexpr int64_t GROUP = FourBits::GROUP;
        const Shape shape = shape_of(weight);
        require(
            shape.size() == 2 && shape[0] > 0 && shape[0] % GROUP == 0 && shape_of(scale) == Shape{shape[1]} &&
                shape_of(zeros) == Shape{shape[0] / GROUP, shape[1]} && shape_of(multipliers) == shape_of(zeros),
            "weight must be [inputs, outputs], with a multiple of 32 inputs, zero point and multiplier [inputs / 32, outputs], and scale "
            "[outputs]",
            ORT_INVALID_GRAPH);
        const auto bytes = [](const Ort::ConstValue& value) { return static_cast<const uint8_t*>(value.GetTensorRawData()); };
        const auto inputs = static_cast<size_t>(shape[0]), outputs = static_cast<size_t>(shape[1]);
        Packed made(chosen(), {bytes(weight), bytes(zeros), bytes(multipliers)}, scale.GetTensorData<float>(), inputs, outputs);
        drop_file_pages(bytes(weight), inputs * outputs / 2);
        return made;
    }

    void compute(const Ort::KernelContext& context) const {
        multiply(context, weights, "GroupedMatMul: the last axis of x must be the weight's inputs");
    }
};

} // namespace

void add_operators(OrtSessionOptions* options) {
    static const Operator<QuantizedMatMul> product;
    static const Operator<GroupedMatMul> grouped;
    static const Ort::CustomOpDomain domain = [] {
        Ort::CustomOpDomain made("mars_export");
        for (const OrtCustomOp* added : {static_cast<const OrtCustomOp*>(&product), static_cast<const OrtCustomOp*>(&grouped),
                                         layer_start(), layer_end(), attention()})
            made.Add(added);
        return made;
    }();
    Ort::ThrowOnError(Ort::GetApi().AddCustomOpDomain(options, domain));
}

const char* instructions() { return chosen().name; }

} // namespace mars::kernels
