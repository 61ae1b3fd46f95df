// runtime/device/variants.py: which variant of a bundle runs on this machine, and why each other one does not.
#pragma once

#include <optional>
#include <string>

#include "bundle/bundle.hpp"
#include "device/engines.hpp"

namespace mars {

/// Whether engines run on `device`: `cuda`, in any case, with or without "ExecutionProvider" and a number.
bool runs_engines(const std::string& device);

/// Why `variant` does not run on `device`; no value if no reason is known. `here` is needed for engines only.
std::optional<std::string> why_not(const Variant& variant, const std::string& device, const Here* here);

/// The variant to open on `device`: on a GPU engines come before graphs, and a graph for CUDA before others; then the manifest's order decides. If
/// `here` is null, the machine is examined.
///
/// Throws SessionError with the reason for each variant. A bundle with engines that all do not fit is an error; it never
/// falls back to a slower graph.
const Variant& choose(const Bundle& bundle, const std::string& device, const Here* here = nullptr);

/// The variant called `name`. Throws BundleError if there is none, SessionError if it does not run here.
const Variant& choose_named(const Bundle& bundle, const std::string& name, const std::string& device, const Here* here = nullptr);

} // namespace mars
