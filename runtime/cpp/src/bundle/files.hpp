// The files of a bundle: safe names, sizes, hashes, and a stamp that spares hashing gigabytes at every start.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/bundle.hpp>

namespace mars {

/// Whether `name` is a plain file name: no directories, no drive, no leading dot.
bool is_safe_name(std::string_view name);

/// The whole file, or nothing if it cannot be read.
std::optional<std::string> read_file(const std::filesystem::path& path);

/// Check presence, links, sizes and hashes of all files; throws one BundleError that lists everything wrong.
///
/// A file whose size, modification time and inode equal those of its last successful check is not hashed again, unless `full`.
void verify(const std::filesystem::path& directory, const std::vector<FileEntry>& entries, bool full);

} // namespace mars
