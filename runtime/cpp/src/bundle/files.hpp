// runtime/bundle/files.py: safe names, sizes, hashes. A bundle may be hostile, so no name in it is trusted.
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

/// The first `limit` bytes of a regular file, or no value if it cannot be read. Never waits for pipes or devices.
std::optional<std::string> read_file(const std::filesystem::path& path, std::size_t limit = std::string::npos);

/// Replace a file by `content`, completely or not at all. Returns whether it succeeded.
bool write_whole(const std::filesystem::path& path, const std::string& content);

/// A file mapped into memory. Mapping needs memory once, reading a copy twice. Empty files have no data.
class MappedFile {
  public:
    /// Throws BundleError if it cannot be mapped.
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const void* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

/// The user's cache directory: `$MARS_EXPORT_CACHE`, otherwise `mars-export` in ~/.cache. No value for a user without a
/// home directory.
std::optional<std::filesystem::path> cache_dir();

/// The file in it with a bundle's stamps, which Python uses too. A bundle itself could contain anything.
std::optional<std::filesystem::path> stamp_file(const std::filesystem::path& bundle);

/// Check that the directory has exactly the files of the manifest, with their sizes and hashes. Throws one BundleError
/// that lists everything wrong.
///
/// With `once`, a file whose stamp (size, times and inode) equals that of an earlier check is not hashed again; with
/// `never`, nothing is hashed. `safe` hashes everything and remembers nothing.
void verify(const std::filesystem::path& directory, const Manifest& manifest, Verify how, bool safe);

/// Advice for what only safe mode refuses.
constexpr std::string_view safe_remedy = "if you trust its source, open it without safe mode";

} // namespace mars
