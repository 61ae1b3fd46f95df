// Which variant of a bundle runs on this machine, and why each other one does not. Twin of runtime/device/variants.py; opens nothing.
#pragma once

#include <optional>
#include <string>

#include "bundle/bundle.hpp"
#include "device/trt/here.hpp"

namespace mars {

/// Whether `device` is where engines run: `cuda`, in any case, with or without "ExecutionProvider" and a GPU's number.
bool runs_engines(const std::string& device);

/// Why `variant` does not run on `device` here; nothing if nothing is known against it. `here` is needed for engines only.
std::optional<std::string> why_not(const Variant& variant, const std::string& device, const Here* here);

/// Why an engine of before cannot decode exactly, with the command that renews it; nothing if nothing is against it.
///
/// A step of exact mode asks for the predictions of its last known token, of every proposal and of every mask.
std::optional<std::string> why_not_exact(const Bundle& bundle, const Variant& variant);

/// The variant to open on `device`: an engine before a graph on a GPU, in the manifest's order. `here` is asked for where it is null.
///
/// Throws SessionError with the reason for each. A bundle with engines of which none fits is an error, not a slower graph.
const Variant& choose(const Bundle& bundle, const std::string& device, const Here* here = nullptr);

/// The variant called `name`. Throws BundleError where there is none, SessionError where it does not run here.
const Variant& choose_named(const Bundle& bundle, const std::string& name, const std::string& device, const Here* here = nullptr);

} // namespace mars
