// runtime/device/ort/kernels.py: mars-export-kernels: an operator for the products of w8a8 graphs on a CPU.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace mars {

/// The library with the operator, and the instruction set that it uses on this processor.
struct Kernels {
    std::filesystem::path library;
    std::string instructions;
};

/// The library in $MARS_KERNELS (a file or a directory), otherwise beside libmars. No value if there is none, if
/// MARS_EXPORT_KERNELS is 0, or if it has no code for this processor.
///
/// Throws SessionError if it does not load, or if the processor lacks the instruction set that MARS_EXPORT_KERNELS names.
std::optional<Kernels> installed_kernels();

} // namespace mars
