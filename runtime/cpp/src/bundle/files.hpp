// The files of a bundle: safe names, sizes, hashes. A bundle may be somebody else's: no name in it is trusted.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <vector>

#include "bundle/bundle.hpp"
#include "bundle/external.hpp"
#include "bundle/held.hpp"

namespace mars {

/// A regular file, open for reading, and its state as of then. Pipes and devices are not waited for.
class PlainFile {
  public:
    explicit PlainFile(const std::filesystem::path& path, int flags = 0);
    PlainFile(const PlainFile&) = delete;
    PlainFile& operator=(const PlainFile&) = delete;
    ~PlainFile();

    bool is_open() const { return file_ >= 0; }

    /// At most `limit` bytes from where the last call ended; no value if the file cannot be read.
    std::optional<std::string> read(std::size_t limit);

    /// What it holds as an ONNX graph, nothing where it is none.
    std::optional<Contents> contents() const;

    /// Its state by now.
    std::optional<State> now() const;

    struct stat state{};

  private:
    int file_;
};

/// Whether `name` is a plain file name: no directories, no drive, no leading dot.
bool is_safe_name(std::string_view name);

/// The whole file, or nothing if it cannot be read.
std::optional<std::string> read_file(const std::filesystem::path& path);

/// Check presence, links, sizes and hashes of all files of the manifest, and that graphs take data from these only; throws one BundleError that
/// lists everything wrong. `held` knows the files' states afterwards.
///
/// A file that was found good and whose stamp (size, times and inode) is that of then is not looked into again, unless `how` is always. If it
/// is never, no file is hashed and none remembered; of graphs the names of their files are looked at. In `safe` mode everything is hashed,
/// nothing is remembered, and graphs have no loops, branches and functions.
void verify(Held& held, const Manifest& manifest, Verify how, bool safe);

/// What to do about what only safe mode refuses.
constexpr std::string_view safe_remedy = "if you trust whoever made it, open it without safe mode";

} // namespace mars
