// No Python file: which engines run on this machine, and how a plugin opens one.
#pragma once

#include <map>
#include <memory>
#include <string>

#include <mars/config.hpp>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"

namespace mars {

/// This machine with one of its GPUs. `gpu` such as `sm86`, with `gpu_name` and the CUDA version of its `driver`; or
/// `no_gpu` says why there is none.
///
/// `tensorrt`: version by backend; `missing`: the reason by backend. `platform` such as `linux-x86_64`.
struct Here {
    std::string platform;
    std::map<std::string, std::string> tensorrt, missing;
    std::string gpu, gpu_name, driver, no_gpu;
};

/// Examine the machine and the GPU of that number. Loads TensorRT and CUDA if installed.
Here look_around(int gpu = 0);

/// How an engine is run: the GPU, the stream (a cudaStream_t; nullptr: a new one), and the receiver
/// of TensorRT's log.
struct EngineOptions {
    int gpu = 0;
    void* stream = nullptr;
    OnLog on_log = nullptr;
};

/// Load an engine variant. Throws SessionError.
std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant, const EngineOptions& options = {});

/// The exports of the plugins libmars_tensorrt.so and libmars_tensorrt_rtx.so. `build` must be that of libmars, because
/// they share C++ classes.
constexpr const char* plugin_build = "libmars " MARS_VERSION ", compiled by " __VERSION__;

struct EnginePlugin {
    const char* build;
    Here (*look_around)(int gpu);
    std::unique_ptr<Backend> (*open)(const Bundle& bundle, const Variant& variant, const EngineOptions& options);
};

} // namespace mars
