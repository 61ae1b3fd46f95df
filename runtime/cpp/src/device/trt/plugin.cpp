// No Python file: the one function that libmars_tensorrt.so and libmars_tensorrt_rtx.so export.
#include "device/cuda.hpp"
#include "device/engines.hpp"
#include "device/trt/backend.hpp"
#include "device/trt/engine.hpp"
#include "machine.hpp"

namespace {

mars::Here look_around(int number) {
    mars::Here here;
    here.platform = mars::this_platform();
    here.tensorrt[mars::tensorrt_flavor()] = mars::tensorrt_version();
    mars::find_gpu(number, here);
    return here;
}

std::unique_ptr<mars::Backend> open(const mars::Bundle& bundle, const mars::Variant& variant, const mars::EngineOptions& options) {
    return std::make_unique<mars::TrtBackend>(bundle, variant, options);
}

} // namespace

extern "C" __attribute__((visibility("default"))) const mars::EnginePlugin* mars_engine_plugin() {
    static const mars::EnginePlugin plugin{mars::plugin_build, look_around, open};
    return &plugin;
}
