// The operators for ONNX Runtime, in the domain `mars_export`. The exported graph has each of them as a function of standard
// operators, for sessions without them.
#include "operators.hpp"

#include <cstdlib>

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
    const Shape shape = shape_of(weight), scales = shape_of(scale);
    constexpr int64_t GROUPS = BLOCK / 4, COLUMNS = BYTES.columns;
    require(
        shape.size() == 4 && shape[1] > 1 && shape[1] % GROUPS == 1 && shape[1] <= 65536 && shape[2] == COLUMNS && shape[3] == 4 &&
            scales.size() == 1 && scales[0] > 0 && shape[0] == (scales[0] + COLUMNS - 1) / COLUMNS &&
            (parts == 1 || scales[0] % (static_cast<int64_t>(parts) * COLUMNS) == 0),
        "weight must be [outputs / 32, inputs / 4 + 1, 32, 4], with at most 262080 inputs, and scale [outputs]: export bundles of older "
        "versions again",
        ORT_INVALID_GRAPH);
    const auto blocks = static_cast<size_t>(shape[1] / GROUPS), columns = static_cast<size_t>(scales[0]) / parts, first = part * columns;
    const size_t panel_bytes = static_cast<size_t>(shape[1]) * 4 * BYTES.columns;
    return {chosen(), weight.GetTensorData<int8_t>() + first / BYTES.columns * panel_bytes, scale.GetTensorData<float>() + first, blocks,
            columns};
}

namespace {

// The product of an operator's first input.
void multiply(const Ort::KernelContext& context, const Packed& weights, const char* error) {
    const auto x = context.GetInput(0);
    Shape shape = shape_of(x);
    const auto inputs = static_cast<size_t>(shape.empty() ? 0 : shape.back());
    require(weights.fits(inputs), error);
    const size_t rows = x.GetTensorTypeAndShapeInfo().GetElementCount() / inputs;
    shape.back() = static_cast<int64_t>(weights.outputs);
    multiply(weights, x.GetTensorData<float>(), rows, inputs, context.GetOutput(0, shape).GetTensorMutableData<float>(), Threads{context});
}

// x [..., inputs] times weight [panels, groups + 1, 32, 4] int8, with a scale for each output
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

// x [..., inputs] times weight [panels, blocks, 9, 16, 4] uint8: four bits in groups of 32 inputs, with a scale for each output
struct GroupedMatMul {
    static constexpr const char* NAME = "GroupedMatMul";
    static constexpr std::string_view INPUTS = "fuf"; // x, weight, scale
    static constexpr std::string_view OUTPUTS = "f";

    const Packed weights;

    explicit GroupedMatMul(const OrtKernelInfo* info) : weights(packed(info)) {}

    static Packed packed(const OrtKernelInfo* info) {
        const auto weight = initializer(info, 1), scale = initializer(info, 2);
        const Shape shape = shape_of(weight), scales = shape_of(scale);
        constexpr int64_t COLUMNS = FOUR_BITS.columns;
        require(shape.size() == 5 && shape[1] > 0 && shape[2] == 9 && shape[3] == COLUMNS && shape[4] == 4 && scales.size() == 1 &&
                    scales[0] > 0 && shape[0] == (scales[0] + COLUMNS - 1) / COLUMNS,
                "weight must be [outputs / 16, inputs / 64, 9, 16, 4] and scale [outputs]: export bundles of older versions again",
                ORT_INVALID_GRAPH);
        return {*chosen().four_bits, weight.GetTensorData<int8_t>(), scale.GetTensorData<float>(), static_cast<size_t>(shape[1]),
                static_cast<size_t>(scales[0])};
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
