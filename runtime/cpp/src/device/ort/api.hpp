// No Python file: ONNX Runtime's C++ interface, and a loaded graph. Only for device/ort and users of its backend.
#pragma once

#define ORT_API_MANUAL_INIT // ort_base() loads the library; a version that is too old is an error, not a crash
#include <exception>
#include <string>

#include <onnxruntime_cxx_api.h>

#include <mars/config.hpp>

namespace mars {

/// The library's table of versions. The first call loads the library: from $MARS_ONNXRUNTIME (a file or a directory),
/// otherwise from the directory of libmars, the onnxruntime wheel beside it, or where the loader looks. Throws SessionError.
const OrtApiBase& ort_base();

/// Initialize the interface; call this first. Throws SessionError if the library is older than the headers.
void init_ort();

/// A graph in ONNX Runtime. Bindings and memory of its allocators must be released before it.
struct OrtGraph {
    OnLog on_log; // receives the session's log, so it must live as long
    Ort::Env env{nullptr};
    Ort::Session session{nullptr};
};

inline std::string first_line(const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
}

/// Whether an error of ONNX Runtime means out of memory.
bool is_shortage(const std::exception& error);

} // namespace mars
