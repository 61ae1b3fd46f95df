// What of this machine decides which engines run, and how one is opened: asked of a library for each TensorRT, found when first needed.
#pragma once

#include <map>
#include <memory>
#include <string>

#include <mars/config.hpp>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"

namespace mars {

/// This machine, with one GPU of it. `gpu` such as `sm86`, with `gpu_name` and the CUDA version of its `driver`; or `no_gpu` says why there is none.
///
/// `tensorrt`: backend -> version of what runs; `missing`: backend -> why there is none. `platform` such as `linux-x86_64`.
struct Here {
    std::string platform;
    std::map<std::string, std::string> tensorrt, missing;
    std::string gpu, gpu_name, driver, no_gpu;
};

/// Ask the machine about the GPU of that number. Loads TensorRT and CUDA where they are.
Here look_around(int gpu = 0);

/// How an engine is run: on which GPU, on whose stream (a cudaStream_t; nullptr: one of its own, of that priority), and who hears TensorRT.
struct EngineOptions {
    int gpu = 0;
    void* stream = nullptr;
    int priority = 0;
    OnLog on_log = nullptr;
};

/// Load an engine variant that fits on a GPU. Throws SessionError.
std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant, const EngineOptions& options = {});

/// What libmars_tensorrt.so and libmars_tensorrt_rtx.so offer to the libmars of the same build; `build` says which: they share C++ classes.
struct EnginePlugin {
    const char* build;
    Here (*look_around)(int gpu);
    std::unique_ptr<Backend> (*open)(const Bundle& bundle, const Variant& variant, const EngineOptions& options);
};

} // namespace mars
