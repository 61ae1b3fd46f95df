// The files of a bundle: safe names, sizes, hashes. A bundle may be somebody else's: no name in it is trusted.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "bundle/bundle.hpp"

namespace mars {

/// Whether `name` is a plain file name: no directories, no drive, no leading dot.
bool is_safe_name(std::string_view name);

/// The first `limit` bytes of a regular file, or nothing if it cannot be read. Pipes and devices are not waited for.
std::optional<std::string> read_file(const std::filesystem::path& path, std::size_t limit = std::string::npos);

/// Put `content` in place of a file, whole or not at all; whether that was possible.
bool write_whole(const std::filesystem::path& path, const std::string& content);

/// Check that the directory has the files of the manifest and no others, their sizes and hashes; throws one BundleError that lists
/// everything wrong.
///
/// With `once` a file whose stamp (size, times and inode) is that of an earlier check is not hashed again; with `never` no file is hashed.
/// In `safe` mode everything is hashed and nothing is remembered.
void verify(const std::filesystem::path& directory, const Manifest& manifest, Verify how, bool safe);

/// What to do about what only safe mode refuses.
constexpr std::string_view safe_remedy = "if you trust its source, open it without safe mode";

} // namespace mars
