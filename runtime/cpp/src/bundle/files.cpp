// Files against the manifest.
#include "bundle/files.hpp"

#include <algorithm>
#include <fcntl.h>
#include <fstream>
#include <sstream>
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

std::optional<std::string> hash(PlainFile& file) {
    Sha256 digest(Hasher::system);
    while (const std::optional<std::string> data = file.read(chunk)) {
        if (data->empty()) return digest.hex();
        digest.add(*data);
    }
    return std::nullopt;
}

bool leads_out(const fs::path& path, const fs::path& directory) {
    std::error_code error;
    if (!fs::is_symlink(fs::symlink_status(path, error))) return false;
    const fs::path target = fs::weakly_canonical(path, error), home = fs::weakly_canonical(directory, error);
    return error || std::mismatch(home.begin(), home.end(), target.begin(), target.end()).first != home.end();
}

Json stamp(const struct stat& state, const FileEntry& entry) {
    const auto nanoseconds = [](const timespec& time) { return std::int64_t{time.tv_sec} * 1000000000 + time.tv_nsec; };
    return {entry.sha256, state.st_size, nanoseconds(state.st_mtim), nanoseconds(state.st_ctim), state.st_ino, state.st_dev};
}

/// What is wrong with a file, "" if nothing; a good file's stamp goes into `seen`, if that is asked for.
std::string problem(const fs::path& directory, const FileEntry& entry, const Json& stamps, Json* seen) {
    const fs::path path = directory / entry.path;
    std::error_code error;
    if (leads_out(path, directory)) return "a link that leads out of the bundle";
    if (!fs::is_regular_file(path, error)) return "missing";
    PlainFile file(path);
    if (!file.is_open()) return "not readable";
    if (file.state.st_size != entry.size)
        return std::to_string(file.state.st_size) + " bytes, the manifest says " + std::to_string(entry.size);
    if (seen == nullptr) return "";
    const Json now = stamp(file.state, entry);
    const auto before = stamps.find(entry.path);
    if (before == stamps.end() || *before != now) {
        const std::optional<std::string> found = hash(file);
        if (!found) return "not readable";
        if (*found != entry.sha256) return "its content does not match the manifest's sha256";
    }
    (*seen)[entry.path] = now;
    return "";
}

} // namespace

PlainFile::PlainFile(const fs::path& path, int flags) : file_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | flags)) {
    if (file_ < 0 || (fstat(file_, &state) == 0 && S_ISREG(state.st_mode))) return;
    close(file_);
    file_ = -1;
}

PlainFile::~PlainFile() {
    if (file_ >= 0) close(file_);
}

std::optional<std::string> PlainFile::read(std::size_t limit) {
    std::string content;
    while (file_ >= 0) {
        const std::size_t size = content.size();
        content.resize(std::min(limit, size + chunk));
        const ssize_t got = ::read(file_, &content[size], content.size() - size);
        if (got < 0) return std::nullopt;
        content.resize(size + static_cast<std::size_t>(got));
        if (got == 0 || content.size() == limit) return content;
    }
    return std::nullopt;
}

bool is_safe_name(std::string_view name) {
    const auto plain = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
    const auto inner = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    return !name.empty() && name.size() <= 200 && plain(name.front()) && std::all_of(name.begin(), name.end(), inner);
}

std::optional<std::string> read_file(const fs::path& path) {
    std::error_code error;
    if (!fs::is_regular_file(path, error)) return std::nullopt;
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    if (!file || (!(content << file.rdbuf()) && fs::file_size(path, error) > 0)) return std::nullopt;
    return content.str();
}

void verify(const fs::path& directory, const std::vector<FileEntry>& entries, Verify how) {
    const std::optional<fs::path> place = how == Verify::never ? std::nullopt : stamp_file(directory);
    const Json stamps = how == Verify::once && place ? read_stamps(*place) : Json::object();
    Json seen = Json::object();
    std::string problems;
    for (const FileEntry& entry : entries) {
        const std::string found = problem(directory, entry, stamps, how == Verify::never ? nullptr : &seen);
        if (!found.empty()) problems += "\n  " + entry.path + ": " + found;
    }
    if (!problems.empty())
        throw BundleError(directory.string() + ": damaged or incomplete:" + problems + "\n  copy or export the bundle again");
    if (place && seen != stamps) write_stamps(*place, seen);
}

} // namespace mars
