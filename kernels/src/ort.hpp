// ONNX Runtime's interface as the operators use it: an operator from a kernel class, packed weights, the session's threads.
#pragma once

#define ORT_API_MANUAL_INIT
#include <atomic>
#include <new>
#include <string_view>

#include <onnxruntime_cxx_api.h>

#include "product.hpp"

namespace mars::kernels {

// The set that MARS_EXPORT_KERNELS asks for if this processor has it, else the fastest.
const InstructionSet& chosen();

// Weights of bytes and scales [outputs] of a kernel's inputs `index` and `index` + 1, which must be initializers: one of `parts` equal parts
// of the outputs.
Packed packed_weights(const OrtKernelInfo* info, size_t index, size_t part = 0, size_t parts = 1);

// Calls part(0) to part(count - 1) on the threads of the session.
struct Threads {
    const Ort::KernelContext& context;

    template <class Part>
    void operator()(size_t count, Part part) const {
        struct Work {
            Part part;
            std::atomic<bool> failed{false};
        } work{part};
        context.ParallelFor(
            [](void* data, size_t index) {
                auto& own = *static_cast<Work*>(data);
                try {
                    own.part(index);
                } catch (const std::bad_alloc&) { // ONNX Runtime's threads end the process at an exception
                    own.failed = true;
                }
            },
            count, 0, &work);
        if (work.failed) throw std::bad_alloc();
    }
};

inline void require(bool is_right, const char* message, OrtErrorCode code = ORT_INVALID_ARGUMENT) {
    if (!is_right) throw Ort::Exception(message, code);
}

// Runs `work`, and returns what it throws as a status.
template <class Work>
OrtStatusPtr status_of(Work work) noexcept try {
    work();
    return nullptr;
} catch (const std::exception& error) {
    return Ort::Status(error).release();
}

template <class Kernel>
struct Instance {
    const Kernel kernel;
    OrtStatusPtr ComputeV2(OrtKernelContext* context) const noexcept {
        return status_of([&] { kernel.compute(Ort::KernelContext(context)); });
    }
};

// The operator called Kernel::NAME, which a Kernel(const OrtKernelInfo*) computes. Kernel::INPUTS and OUTPUTS have a letter for each: b for
// int8, u for uint8, i for int64, f for floats, F for floats that may be absent.
template <class Kernel>
struct Operator : Ort::CustomOpBase<Operator<Kernel>, Instance<Kernel>, true> {
    OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const noexcept {
        return status_of([=] { *kernel = new Instance<Kernel>{Kernel(info)}; });
    }
    const char* GetName() const { return Kernel::NAME; }
    size_t GetInputTypeCount() const { return Kernel::INPUTS.size(); }
    ONNXTensorElementDataType GetInputType(size_t index) const { return type_of(Kernel::INPUTS[index]); }
    OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
        return Kernel::INPUTS[index] == 'F' ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    }
    size_t GetOutputTypeCount() const { return Kernel::OUTPUTS.size(); }
    ONNXTensorElementDataType GetOutputType(size_t index) const { return type_of(Kernel::OUTPUTS[index]); }

    static ONNXTensorElementDataType type_of(char letter) {
        if (letter == 'i') return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        if (letter == 'u') return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
        return letter == 'b' ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
};

// Operators of this library
const OrtCustomOp* layer_start();
const OrtCustomOp* layer_end();
const OrtCustomOp* attention();

} // namespace mars::kernels
