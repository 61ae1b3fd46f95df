// Calibrated settings kept in a bundle: found, and checked against what is running. Twin of runtime/bundle/profiles.py; writes nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"

namespace mars {

/// The hash that the manifest lists for one of its files.
std::optional<std::string> sha256_of(const Manifest& manifest, const std::optional<std::string>& file);

/// The profile `name` for the variant that runs. Throws SessionError where there is none, or only a stale one, with the remedy.
const Profile& find_profile(const Bundle& bundle, const Variant& variant, const std::string& name);

/// Why a profile says nothing about `variant` of this bundle; empty for a valid one.
std::vector<std::string> staleness(const Manifest& manifest, const Variant& variant, const Profile& profile);

} // namespace mars
