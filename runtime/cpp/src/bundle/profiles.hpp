// runtime/bundle/profiles.py: calibrated profiles: finding them, and checking that they match the running variant
#pragma once

#include <optional>
#include <string>

#include "bundle/bundle.hpp"

namespace mars {

/// The hash that the manifest lists for a file.
std::optional<std::string> sha256_of(const Manifest& manifest, const std::optional<std::string>& file);

/// The profile `name` for the running variant. Throws SessionError with advice if there is none, or only a stale one.
const Profile& find_profile(const Bundle& bundle, const Variant& variant, const std::string& name);

} // namespace mars
