// Loads the TensorRT plugins by dlopen: libmars itself needs neither TensorRT nor CUDA to start.
#include "device/engines.hpp"

#include <dlfcn.h>
#include <filesystem>
#include <string_view>

#include <mars/errors.hpp>

#include "machine.hpp"

namespace mars {

namespace {

constexpr const char* backends[] = {"tensorrt", "tensorrt_rtx"};

/// The plugin of a backend, beside this library or where the loader looks. It stays loaded, as CUDA requires. Throws
/// SessionError that says why there is none.
const EnginePlugin& plugin_for(const std::string& backend) {
    const std::string file = "libmars_" + backend + ".so";
    const std::filesystem::path beside = own_directory() / file;
    std::error_code error;
    const bool is_beside = std::filesystem::exists(beside, error);
    void* library = dlopen(is_beside ? beside.c_str() : file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) {
        const char* why = dlerror();
        throw SessionError(why != nullptr ? why : file + " does not load");
    }
    void* function = dlsym(library, "mars_engine_plugin");
    dlclose(library); // only its reference count: RTLD_NODELETE keeps it loaded
    if (function == nullptr) throw SessionError(file + " is not a plugin of libmars");
    const EnginePlugin* plugin = reinterpret_cast<const EnginePlugin* (*)()>(function)();
    if (std::string_view(plugin->build) != plugin_build)
        throw SessionError(file + " was built as " + plugin->build + ", this library as " + plugin_build +
                           "; install both from the same build");
    return *plugin;
}

} // namespace

Here look_around(int gpu) {
    Here here;
    here.platform = this_platform();
    for (const char* backend : backends) {
        try {
            Here part = plugin_for(backend).look_around(gpu);
            part.tensorrt.insert(here.tensorrt.begin(), here.tensorrt.end());
            part.missing = std::move(here.missing);
            here = std::move(part);
        } catch (const SessionError& error) {
            here.missing[backend] = error.what();
        }
    }
    return here;
}

std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant, const EngineOptions& options) {
    return plugin_for(variant.backend).open(bundle, variant, options); // the variant was chosen, so the plugin is there
}

} // namespace mars
