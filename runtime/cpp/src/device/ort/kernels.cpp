#include "device/ort/kernels.hpp"

#include <cstdlib>
#include <dlfcn.h>
#include <utility>

#include <mars/errors.hpp>

#include "machine.hpp"

namespace mars {

namespace {

constexpr const char* operator_file = "libmars_export_kernels.so";
constexpr const char* place_variable = "MARS_KERNELS";
constexpr const char* set_variable = "MARS_EXPORT_KERNELS"; // read by the library, too
constexpr const char* portable_set = "portable";            // slower than ONNX Runtime's own products; for tests

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

/// The instruction set that a library uses on this processor.
std::string instructions_of(const std::filesystem::path& file) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    void* function = library == nullptr ? nullptr : dlsym(library, "mars_export_kernels_instructions");
    if (function == nullptr) {
        const char* why = dlerror();
        throw SessionError(std::string("mars-export-kernels cannot be loaded: ") + (why == nullptr ? file.c_str() : why) + "; set " +
                           place_variable + " to its library (docs/cpp.md), or " + set_variable + "=0 to do without it");
    }
    return reinterpret_cast<const char* (*)()>(function)();
}

} // namespace

std::optional<Kernels> installed_kernels() {
    const std::string wanted = environment(set_variable), place = environment(place_variable);
    if (wanted == "0") return std::nullopt;
    std::error_code error;
    std::filesystem::path file = place.empty() ? own_directory() : std::filesystem::path(place);
    if (std::filesystem::is_directory(file, error)) file /= operator_file;
    if (place.empty() && !std::filesystem::exists(file, error)) return std::nullopt;
    std::string instructions = instructions_of(file);
    if (!wanted.empty() && wanted != instructions)
        throw SessionError(std::string(set_variable) + "=" + wanted.substr(0, 60) +
                           " is not an instruction set of this processor, whose fastest is " + instructions +
                           "; unset it, or set it to 0 to do without the library");
    if (instructions == portable_set && wanted.empty()) return std::nullopt;
    return Kernels{std::move(file), std::move(instructions)};
}

} // namespace mars
