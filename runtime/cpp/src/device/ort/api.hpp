// ONNX Runtime's C++ interface as this library includes it, and a loaded session with what must live as long. Only files of device/ort*
// include this.
#pragma once

#define ORT_API_MANUAL_INIT // the library is loaded by ort_base; one that is too old is an error, not a crash
#include <exception>
#include <string>
#include <utility>

#include <onnxruntime_cxx_api.h>

#include <mars/config.hpp>

namespace mars {

/// The library's table of versions. Loads it at the first call: from $MARS_ONNXRUNTIME (a file or a directory), else from the directory of
/// libmars, else from where the loader looks. Throws SessionError.
const OrtApiBase& ort_base();

/// Before anything else of ONNX Runtime. Throws SessionError when the library is older than the headers.
void init_ort();

/// A graph in ONNX Runtime. Memory that its allocators gave, and everything that is bound, goes before it.
struct OrtGraph {
    OnLog on_log; // hears the session, to its end
    Ort::Env env{nullptr};
    Ort::Session session{nullptr};
};

inline std::string first_line(const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
}

/// Whether an error of ONNX Runtime says that memory was missing.
bool is_shortage(const std::exception& error);

} // namespace mars
