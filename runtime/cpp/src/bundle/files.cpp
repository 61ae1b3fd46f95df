#include "bundle/files.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/sha256.hpp"
#include "bundle/stamps.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr std::size_t chunk = std::size_t{1} << 20U;

/// A regular file, opened for reading.
class PlainFile {
  public:
    explicit PlainFile(const fs::path& path) : file_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
        if (file_ < 0 || (fstat(file_, &state) == 0 && S_ISREG(state.st_mode))) return;
        close(file_);
        file_ = -1;
    }
    PlainFile(const PlainFile&) = delete;
    PlainFile& operator=(const PlainFile&) = delete;
    ~PlainFile() {
        if (file_ >= 0) close(file_);
    }

    bool is_open() const { return file_ >= 0; }

    /// Read at most `limit` bytes from the current position; no value if the file cannot be read.
    std::optional<std::string> read(std::size_t limit) {
        std::string content;
        while (file_ >= 0) {
            const std::size_t size = content.size();
            content.resize(std::min(limit, size + chunk));
            const ssize_t count = ::read(file_, &content[size], content.size() - size);
            if (count < 0 && errno != EINTR) return std::nullopt;
            content.resize(size + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
            if (count == 0 || content.size() == limit) return content;
        }
        return std::nullopt;
    }

    /// The contents in memory, until unmapped; MAP_FAILED on failure.
    void* map() const { return mmap(nullptr, static_cast<std::size_t>(state.st_size), PROT_READ, MAP_PRIVATE, file_, 0); }

    struct stat state{};

  private:
    int file_;
};

std::optional<std::string> hash(PlainFile& file) {
    Sha256 digest;
    while (const std::optional<std::string> data = file.read(chunk)) {
        if (data->empty()) return digest.hex();
        digest.add(*data);
    }
    return std::nullopt;
}

/// A file's stamp, remembered after it was hashed: hash, size, times of modification and change in nanoseconds, inode,
/// device.
Json stamp(const struct stat& state, const FileEntry& entry) {
    const auto nanoseconds = [](const timespec& time) { return std::int64_t{time.tv_sec} * 1000000000 + time.tv_nsec; };
    return {entry.sha256, std::int64_t{state.st_size}, nanoseconds(state.st_mtim), nanoseconds(state.st_ctim), state.st_ino, state.st_dev};
}

/// What is wrong with a file, "" if nothing. The stamp of a good file is added to `seen`, unless it is null (no
/// hashing).
std::string problem(const fs::path& path, const FileEntry& entry, const Json& stamps, Json* seen) {
    std::error_code error;
    if (!fs::is_regular_file(path, error)) return "missing";
    PlainFile file(path);
    if (!file.is_open()) return "not readable";
    if (file.state.st_size != entry.size)
        return std::to_string(file.state.st_size) + " bytes, the manifest says " + std::to_string(entry.size);
    if (seen == nullptr) return "";
    const Json now = stamp(file.state, entry);
    const auto before = stamps.find(entry.path);
    if (before == stamps.end() || *before != now) {
        const std::optional<std::string> digest = hash(file);
        if (!digest) return "not readable";
        if (*digest != entry.sha256) return "its content does not match the manifest's sha256";
    }
    (*seen)[entry.path] = now;
    return "";
}

} // namespace

bool is_safe_name(std::string_view name) {
    const auto plain = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
    const auto inner = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    return !name.empty() && name.size() <= 200 && plain(name.front()) && std::all_of(name.begin(), name.end(), inner);
}

std::optional<std::string> read_file(const fs::path& path, std::size_t limit) { return PlainFile(path).read(limit); }

bool write_whole(const fs::path& path, const std::string& content) {
    std::string scratch = (path.parent_path() / ".XXXXXX").string();
    const int file = mkostemp(scratch.data(), O_CLOEXEC);
    if (file < 0) return false;
    std::size_t done = 0;
    while (done < content.size()) {
        const ssize_t count = write(file, content.data() + done, content.size() - done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) break;
        done += static_cast<std::size_t>(count);
    }
    const bool is_whole = done == content.size() && fsync(file) == 0;
    close(file);
    if (is_whole && rename(scratch.c_str(), path.c_str()) == 0) return true;
    unlink(scratch.c_str());
    return false;
}

MappedFile::MappedFile(const fs::path& path) {
    const PlainFile file(path);
    size_ = static_cast<std::size_t>(file.state.st_size);
    if (file.is_open() && size_ > 0) data_ = file.map();
    if (!file.is_open() || data_ == MAP_FAILED) throw BundleError(path.string() + ": not readable; copy or build the bundle again");
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
}

void verify(const fs::path& directory, const Manifest& manifest, Verify how, bool safe) {
    const bool hashes = how != Verify::never || safe;
    const std::optional<fs::path> place = safe || !hashes ? std::nullopt : stamp_file(directory);
    const Json stamps = how == Verify::once && place ? read_stamps(*place) : Json::object();
    Json seen = Json::object();
    std::string problems;
    std::set<std::string> listed{"manifest.json", "manifest.sha256"};
    for (const FileEntry& entry : manifest.files) {
        listed.insert(entry.path);
        const std::string what = problem(directory / entry.path, entry, stamps, hashes ? &seen : nullptr);
        if (!what.empty()) problems += "\n  " + entry.path + ": " + what;
    }
    std::error_code error;
    for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
        if (const std::string name = at->path().filename().string(); listed.count(name) == 0)
            problems += "\n  " + name.substr(0, 80) + ": not listed in the manifest; remove it";
    if (!problems.empty())
        throw BundleError(directory.string() + ": damaged or incomplete:" + problems + "\n  copy or export the bundle again");
    if (place && seen != stamps) write_stamps(*place, seen);
}

} // namespace mars
