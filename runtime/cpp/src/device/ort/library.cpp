// runtime/device/ort/library.py: loads ONNX Runtime by dlopen: any version not older than its headers.
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <string>

#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "device/ort/api.hpp"
#include "machine.hpp"

namespace mars {

namespace {

namespace fs = std::filesystem;

constexpr const char* library_name = "libonnxruntime.so.1";
constexpr const char* variable = "MARS_ONNXRUNTIME";
constexpr const char* wheel = "../../onnxruntime/capi"; // from lib/ of the Python package mars-export-cpp

/// The library in a directory. In a wheel it has a versioned name only.
fs::path library_in(const fs::path& directory) {
    std::error_code error;
    if (fs::exists(directory / library_name, error)) return directory / library_name;
    for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
        if (at->path().filename().string().rfind(library_name, 0) == 0) return at->path();
    return {};
}

void* open_library() {
    const char* said = std::getenv(variable);
    std::error_code error;
    fs::path path = said != nullptr && *said != '\0' ? fs::path(said) : library_in(own_directory());
    if (path.empty()) path = library_in(own_directory() / wheel);
    if (fs::is_directory(path, error)) path = library_in(fs::absolute(path));
    // Resolve links: ONNX Runtime looks for its providers beside the path it was opened by.
    if (!path.empty()) path = fs::weakly_canonical(path, error);
    void* library = dlopen(path.empty() ? library_name : path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library != nullptr) return library;
    const char* why = dlerror();
    throw SessionError(std::string("ONNX Runtime cannot be loaded: ") + (why != nullptr ? why : library_name) +
                       "; install it where the loader looks or beside libmars, or set " + variable + " to its library (docs/cpp.md)");
}

} // namespace

std::string onnxruntime_library() {
    const OrtApiBase& base = ort_base();
    Dl_info found{};
    const bool is_found = dladdr(reinterpret_cast<const void*>(base.GetApi), &found) != 0;
    return std::string(base.GetVersionString()) + (is_found ? std::string(", ") + found.dli_fname : "");
}

const OrtApiBase& ort_base() {
    static const OrtApiBase* const base = [] {
        void* function = dlsym(open_library(), "OrtGetApiBase");
        if (function == nullptr) throw SessionError("the library that was loaded as ONNX Runtime has no OrtGetApiBase");
        return reinterpret_cast<const OrtApiBase* (*)()>(function)();
    }();
    return *base;
}

void init_ort() {
    static const bool once = [] {
        const OrtApi* api = ort_base().GetApi(ORT_API_VERSION);
        if (api == nullptr)
            throw SessionError(std::string("ONNX Runtime ") + ort_base().GetVersionString() +
                               " is older than the headers this library was built with (1." + std::to_string(ORT_API_VERSION) +
                               "); install that version or a newer one");
        Ort::InitApi(api);
        return true;
    }();
    static_cast<void>(once);
}

} // namespace mars
