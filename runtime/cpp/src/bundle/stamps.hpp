// Stamps of files that were hashed before, kept in the user's cache. A bundle itself could contain anything.
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

namespace mars {

/// The user's cache directory: `$MARS_EXPORT_CACHE`, otherwise `mars-export` in ~/.cache. No value for a user without a
/// home directory.
std::optional<std::filesystem::path> cache_dir();

/// The file with a bundle's stamps, which Python uses too.
std::optional<std::filesystem::path> stamp_file(const std::filesystem::path& bundle);

/// Stamps by file name; empty if the file is missing or invalid.
nlohmann::json read_stamps(const std::filesystem::path& file);

/// If this fails, every start hashes all files.
void write_stamps(const std::filesystem::path& file, const nlohmann::json& stamps);

} // namespace mars
