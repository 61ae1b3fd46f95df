// The operator `mars_export::QuantizedMatMul` for ONNX Runtime: x [..., inputs] times weight [inputs, outputs] int8, with a scale for each
// output. The exported graph has the same as a function of standard operators, for sessions without this library.
#define ORT_API_MANUAL_INIT
#include <cstdlib>

#include <onnxruntime_cxx_api.h>

#include "attention_operator.hpp"
#include "product.hpp"

namespace {

using mars::kernels::Packed;

constexpr uint32_t OLDEST_API = 1; // which every ONNX Runtime has

const mars::kernels::InstructionSet& chosen() { return mars::kernels::choose(std::getenv("MARS_EXPORT_KERNELS")); }

Packed packed_weights(const OrtKernelInfo* info) {
    const Ort::ConstKernelInfo kernel(info);
    int weight_is_constant = 0, scale_is_constant = 0;
    const auto weight = kernel.GetTensorConstantInput(1, &weight_is_constant), scale = kernel.GetTensorConstantInput(2, &scale_is_constant);
    if (!weight_is_constant || !scale_is_constant)
        throw Ort::Exception("QuantizedMatMul: weight and scale must be initializers", ORT_INVALID_GRAPH);
    const auto shape = weight.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() != 2 || shape[0] < 1 || shape[0] > 4 * 65535 || scale.GetTensorTypeAndShapeInfo().GetShape() != std::vector{shape[1]})
        throw Ort::Exception("QuantizedMatMul: weight must be [inputs, outputs], with at most 262140 inputs, and scale [outputs]",
                             ORT_INVALID_GRAPH);
    return {chosen(), weight.GetTensorData<int8_t>(), scale.GetTensorData<float>(), static_cast<size_t>(shape[0]),
            static_cast<size_t>(shape[1])};
}

class Kernel {
  public:
    explicit Kernel(const OrtKernelInfo* info) : weights(packed_weights(info)) {}

    void compute(OrtKernelContext* raw) const {
        const Ort::KernelContext context(raw);
        const auto x = context.GetInput(0);
        auto shape = x.GetTensorTypeAndShapeInfo().GetShape();
        if (shape.empty() || shape.back() != static_cast<int64_t>(weights.inputs))
            throw Ort::Exception("QuantizedMatMul: the last axis of x must be the weight's inputs", ORT_INVALID_ARGUMENT);
        const size_t rows = x.GetTensorTypeAndShapeInfo().GetElementCount() / weights.inputs;
        shape.back() = static_cast<int64_t>(weights.outputs);
        float* out = context.GetOutput(0, shape).GetTensorMutableData<float>();
        mars::kernels::multiply(weights, x.GetTensorData<float>(), rows, out, [&context](size_t count, auto part) {
            context.ParallelFor([](void* data, size_t index) { (*static_cast<decltype(part)*>(data))(index); }, count, 0, &part);
        });
    }

    OrtStatusPtr ComputeV2(OrtKernelContext* context) const noexcept try {
        compute(context);
        return nullptr;
    } catch (const std::exception& error) {
        return Ort::Status(error).release();
    }

  private:
    const Packed weights;
};

struct QuantizedMatMul : Ort::CustomOpBase<QuantizedMatMul, Kernel, true> {
    OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const noexcept try {
        *kernel = new Kernel(info);
        return nullptr;
    } catch (const std::exception& error) {
        return Ort::Status(error).release();
    }
    const char* GetName() const { return "QuantizedMatMul"; }
    size_t GetInputTypeCount() const { return 3; }
    ONNXTensorElementDataType GetInputType(size_t index) const {
        return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
    size_t GetOutputTypeCount() const { return 1; }
    ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
};

} // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept
    try {
    const OrtApi* const api = base->GetApi(ORT_API_VERSION);
    if (!api)
        return base->GetApi(OLDEST_API)
            ->CreateStatus(ORT_FAIL, "mars-export-kernels was built with the headers of a newer ONNX Runtime: update onnxruntime, or set "
                                     "MARS_EXPORT_KERNELS=0");
    Ort::InitApi(api);
    static const QuantizedMatMul product;
    static const Ort::CustomOpDomain domain = [] {
        Ort::CustomOpDomain made("mars_export");
        made.Add(&product);
        made.Add(attention_operator(chosen().name));
        return made;
    }();
    return Ort::GetApi().AddCustomOpDomain(options, domain);
} catch (const std::exception& error) {
    return Ort::Status(error).release();
}

extern "C" __attribute__((visibility("default"))) const char* mars_export_kernels_instructions() { return chosen().name; }
