// Files against the manifest. The stamp file is the Python runtime's, so that either reader spares the other the hashing.
#include "bundle/files.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "bundle/sha256.hpp"

namespace mars {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr const char* stamp_file = ".verified.json";

std::optional<std::string> hash(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    Sha256 digest;
    std::vector<char> chunk(std::size_t{1} << 20U);
    while (file) {
        file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
        digest.add({chunk.data(), static_cast<std::size_t>(file.gcount())});
    }
    if (!file.eof()) return std::nullopt;
    return digest.hex();
}

bool leads_out(const fs::path& path, const fs::path& directory) {
    std::error_code error;
    if (!fs::is_symlink(fs::symlink_status(path, error))) return false;
    const fs::path target = fs::weakly_canonical(path, error), home = fs::weakly_canonical(directory, error);
    return error || std::mismatch(home.begin(), home.end(), target.begin(), target.end()).first != home.end();
}

Json stamp(const struct stat& state, const FileEntry& entry) {
    const std::int64_t modified = std::int64_t{state.st_mtim.tv_sec} * 1000000000 + state.st_mtim.tv_nsec;
    return {entry.sha256, state.st_size, modified, state.st_ino};
}

/// What is wrong with a file, "" if nothing; a good file's stamp goes into `seen`.
std::string problem(const fs::path& directory, const FileEntry& entry, const Json& stamps, Json& seen) {
    const fs::path path = directory / entry.path;
    struct stat state{};
    if (leads_out(path, directory)) return "a link that leads out of the bundle";
    if (stat(path.c_str(), &state) != 0 || !S_ISREG(state.st_mode)) return "missing";
    if (state.st_size != entry.size) return std::to_string(state.st_size) + " bytes, the manifest says " + std::to_string(entry.size);
    const Json now = stamp(state, entry);
    const auto before = stamps.find(entry.path);
    if (before == stamps.end() || *before != now) {
        const std::optional<std::string> found = hash(path);
        if (!found) return "not readable";
        if (*found != entry.sha256) return "its content does not match the manifest's sha256";
    }
    seen[entry.path] = now;
    return "";
}

Json read_stamps(const fs::path& directory) {
    const std::optional<std::string> text = read_file(directory / stamp_file);
    try {
        Json value = text && text->size() < 16000000 ? parse_json(*text) : Json();
        if (value.is_object()) return value;
    } catch (const std::exception&) { // hostile or damaged: every file is hashed
    }
    return Json::object();
}

void write_stamps(const fs::path& directory, const Json& stamps) {
    // A read-only bundle is checked in full each time.
    const fs::path scratch = directory / (std::string(stamp_file) + "." + std::to_string(getpid()));
    std::error_code ignored;
    if (std::ofstream(scratch, std::ios::binary) << stamps.dump())
        fs::rename(scratch, directory / stamp_file, ignored);
    else
        fs::remove(scratch, ignored);
}

} // namespace

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

void verify(const fs::path& directory, const std::vector<FileEntry>& entries, bool full) {
    const Json stamps = full ? Json::object() : read_stamps(directory);
    Json seen = Json::object();
    std::string problems;
    for (const FileEntry& entry : entries) {
        const std::string found = problem(directory, entry, stamps, seen);
        if (!found.empty()) problems += "\n  " + entry.path + ": " + found;
    }
    if (!problems.empty())
        throw BundleError(directory.string() + ": damaged or incomplete:" + problems + "\n  copy or export the bundle again");
    if (seen != stamps) write_stamps(directory, seen);
}

} // namespace mars
