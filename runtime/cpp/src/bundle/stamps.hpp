// What this user's earlier starts found good: kept in the user's cache, never in the bundle, which could say anything about itself.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

namespace mars {

/// Where this user keeps what can be made again: `$MARS_EXPORT_CACHE`, else `mars-export` in ~/.cache. Nothing for a user without a home.
std::optional<std::filesystem::path> cache_dir();

/// The file with the stamps of a bundle: Python's, too, which looks at the same things.
std::optional<std::filesystem::path> stamp_file(const std::filesystem::path& bundle);

/// By file name; empty where there is nothing that makes sense.
nlohmann::json read_stamps(const std::filesystem::path& file);

/// Without a place for them every start hashes all files. Only the newest 256 bundles' are kept.
void write_stamps(const std::filesystem::path& file, const nlohmann::json& stamps);

} // namespace mars
