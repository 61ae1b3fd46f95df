// What of this machine and this build decides which engines run. Made by trt_here.cpp, or no_trt.cpp in a build without TensorRT.
#pragma once

#include <memory>
#include <string>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"

namespace mars {

/// This machine. `gpu` such as `sm86`, with `gpu_name` and the CUDA version of its `driver`; or `no_gpu` says why there is none.
///
/// `flavor` and `version`: the TensorRT of this build, "" for a build without. `platform` such as `linux-x86_64`.
struct Here {
    std::string platform, flavor, version, gpu, gpu_name, driver, no_gpu;
};

/// Ask the machine.
Here look_around();

/// Load an engine variant that fits. Throws SessionError.
std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant);

} // namespace mars
