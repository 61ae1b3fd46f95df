// The functions of this package's library.
#include "operators.hpp"
#include "ort.hpp"

namespace {
constexpr uint32_t OLDEST_API = 1; // which every ONNX Runtime has
}

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) noexcept {
    const OrtApi* const api = base->GetApi(ORT_API_VERSION);
    if (!api)
        return base->GetApi(OLDEST_API)
            ->CreateStatus(ORT_FAIL, "mars-export-kernels was built with the headers of a newer ONNX Runtime: update onnxruntime, or set "
                                     "MARS_EXPORT_KERNELS=0");
    Ort::InitApi(api);
    return mars::kernels::status_of([=] { mars::kernels::add_operators(options); });
}

extern "C" __attribute__((visibility("default"))) const char* mars_export_kernels_instructions() { return mars::kernels::instructions(); }
