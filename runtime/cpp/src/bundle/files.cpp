#include "bundle/files.hpp"

#include <algorithm>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "bundle/sha256.hpp"
#include "joined.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr std::size_t chunk = std::size_t{1} << 20U, stamp_limit = 1000000; // bytes

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::optional<std::string> hash(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string data(chunk, '\0');
    Sha256 digest;
    while (file.read(data.data(), chunk) || file.gcount() > 0) digest.add({data.data(), static_cast<std::size_t>(file.gcount())});
    return file.eof() ? std::optional(digest.hex()) : std::nullopt;
}

/// A file's stamp, remembered after it was hashed: hash, size, times of modification and change in nanoseconds, inode,
/// device.
Json stamp(const struct stat& state, const FileEntry& entry) {
    const auto nanoseconds = [](const timespec& time) { return std::int64_t{time.tv_sec} * 1000000000 + time.tv_nsec; };
    return {entry.sha256, std::int64_t{state.st_size}, nanoseconds(state.st_mtim), nanoseconds(state.st_ctim), state.st_ino, state.st_dev};
}

/// Stamps by file name; empty if the file is missing or invalid.
Json read_stamps(const fs::path& file) {
    const std::optional<std::string> text = read_file(file, stamp_limit + 1);
    try {
        Json value = text && text->size() <= stamp_limit ? parse_json(*text) : Json();
        if (value.is_object()) return value;
    } catch (const std::exception&) { // damaged or hostile: hash every file
    }
    return Json::object();
}

/// If this fails, every start hashes all files.
void write_stamps(const fs::path& file, const Json& stamps) {
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    fs::permissions(file.parent_path(), fs::perms::owner_all, error);
    if (!error) write_whole(file, stamps.dump(-1, ' ', true, Json::error_handler_t::replace));
}

/// The error of a file, "" if there is none. The stamp of a good file is added to `seen`, unless it is null (no
/// hashing).
std::string problem(const fs::path& path, const FileEntry& entry, const Json& stamps, Json* seen) {
    struct stat state{};
    if (stat(path.c_str(), &state) != 0 || !S_ISREG(state.st_mode)) return "missing";
    if (state.st_size != entry.size) return std::to_string(state.st_size) + " bytes, the manifest says " + std::to_string(entry.size);
    if (seen == nullptr) return "";
    const Json now = stamp(state, entry);
    const auto before = stamps.find(entry.path);
    if (before == stamps.end() || *before != now) {
        const std::optional<std::string> digest = hash(path);
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

std::optional<std::string> read_file(const fs::path& path, std::size_t limit) {
    std::error_code error;
    if (!fs::is_regular_file(path, error)) return std::nullopt;
    std::ifstream file(path, std::ios::binary);
    std::string content(std::min<std::uintmax_t>(limit, fs::file_size(path)), '\0');
    file.read(content.data(), static_cast<std::streamsize>(content.size()));
    return file ? std::optional(std::move(content)) : std::nullopt;
}

bool write_whole(const fs::path& path, const std::string& content) {
    std::string scratch = (path.parent_path() / ".XXXXXX").string();
    const int descriptor = mkstemp(scratch.data());
    if (descriptor < 0) return false;
    close(descriptor);
    std::ofstream file(scratch, std::ios::binary);
    file << content;
    file.close();
    if (file && rename(scratch.c_str(), path.c_str()) == 0) return true;
    unlink(scratch.c_str());
    return false;
}

MappedFile::MappedFile(const fs::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    size_ = file < 0 ? 0 : static_cast<std::size_t>(std::max(lseek(file, 0, SEEK_END), off_t{0}));
    if (size_ > 0) data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    if (file >= 0) close(file);
    if (file < 0 || data_ == MAP_FAILED) throw BundleError(path.string() + ": not readable; copy or build the bundle again");
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
}

std::optional<fs::path> cache_dir() {
    const std::string chosen = variable("MARS_EXPORT_CACHE"), base = variable("XDG_CACHE_HOME"), home = variable("HOME");
    if (chosen == "~" || begins_with(chosen, "~/")) return home.empty() ? std::nullopt : std::optional<fs::path>(home + chosen.substr(1));
    if (!chosen.empty()) return chosen;
    if (!base.empty()) return fs::path(base) / "mars-export";
    return home.empty() ? std::nullopt : std::optional<fs::path>(fs::path(home) / ".cache" / "mars-export");
}

std::optional<fs::path> stamp_file(const fs::path& bundle) {
    const std::optional<fs::path> cache = cache_dir();
    std::error_code error;
    const fs::path whole = fs::canonical(bundle, error);
    if (!cache || error) return std::nullopt;
    return *cache / "verified" / (sha256(whole.native()).substr(0, 32) + ".json");
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
