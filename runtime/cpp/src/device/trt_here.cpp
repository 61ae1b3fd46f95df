// A build with TensorRT: what it finds on the machine.
#include "device/cuda.hpp"
#include "device/here.hpp"
#include "device/trt.hpp"
#include "device/trt_engine.hpp"

namespace mars {

Here look_around() {
    Here here{this_platform(), tensorrt_flavor(), tensorrt_version(), "", "", "", ""};
    const auto gpu = find_gpu();
    if (const auto* found = std::get_if<Gpu>(&gpu)) {
        here.gpu = found->capability;
        here.gpu_name = found->name;
        here.driver = found->driver;
    } else {
        here.no_gpu = std::get<std::string>(gpu);
    }
    return here;
}

std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant) { return std::make_unique<TrtBackend>(bundle, variant); }

} // namespace mars
