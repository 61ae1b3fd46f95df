// Loads the TensorRT plugins by dlopen: libmars itself needs neither TensorRT nor CUDA to start.
#include "device/engines.hpp"

#include <dlfcn.h>
#include <filesystem>
#include <string_view>
#include <variant>

#include <mars/errors.hpp>

#include "machine.hpp"

namespace mars {

namespace {

constexpr const char* backends[] = {"tensorrt", "tensorrt_rtx"};

std::string file_of(const std::string& backend) { return "libmars_" + backend + ".so"; }

/// The plugin of a backend, beside this library or where the loader looks, or a sentence why there is none. It stays
/// loaded, as CUDA requires.
std::variant<const EnginePlugin*, std::string> plugin_for(const std::string& backend) {
    const std::string file = file_of(backend);
    const std::filesystem::path beside = own_directory() / file;
    std::error_code error;
    const bool is_beside = std::filesystem::exists(beside, error);
    void* library = dlopen(is_beside ? beside.c_str() : file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) {
        const char* why = dlerror();
        return why != nullptr ? why : file + " does not load";
    }
    void* function = dlsym(library, "mars_engine_plugin");
    dlclose(library); // only its reference count: RTLD_NODELETE keeps it loaded
    if (function == nullptr) return file + " is not a plugin of libmars";
    const EnginePlugin* plugin = reinterpret_cast<const EnginePlugin* (*)()>(function)();
    if (std::string_view(plugin->build) != plugin_build)
        return file + " was built as " + plugin->build + ", this library as " + plugin_build + "; install both from the same build";
    return plugin;
}

} // namespace

Here look_around(int gpu) {
    Here here;
    here.platform = this_platform();
    for (const char* backend : backends) {
        const auto plugin = plugin_for(backend);
        if (const auto* why = std::get_if<std::string>(&plugin)) {
            here.missing[backend] = *why;
            continue;
        }
        Here part = std::get<const EnginePlugin*>(plugin)->look_around(gpu);
        part.tensorrt.insert(here.tensorrt.begin(), here.tensorrt.end());
        part.missing = std::move(here.missing);
        here = std::move(part);
    }
    return here;
}

std::unique_ptr<Backend> open_engine(const Bundle& bundle, const Variant& variant, const EngineOptions& options) {
    const auto plugin = plugin_for(variant.backend);
    if (const auto* why = std::get_if<std::string>(&plugin))
        throw SessionError(bundle.path.string() + ": variant " + variant.name + " needs " + file_of(variant.backend) + ": " + *why);
    return std::get<const EnginePlugin*>(plugin)->open(bundle, variant, options);
}

} // namespace mars
