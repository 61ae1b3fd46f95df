// Files against the manifest.
#include "bundle/files.hpp"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <sys/mman.h>
#include <thread>
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
constexpr std::chrono::milliseconds tick(12); // the longest of Linux's, and some more

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

Json stamp(const State& state, const FileEntry& entry) {
    Json made{entry.sha256};
    for (const std::int64_t number : state) made.push_back(number);
    return made;
}

/// Wait until a write that comes from now on has another time than the last one: a file system's clock stands still for a tick.
void settle(const State& state) {
    const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch());
    const std::chrono::nanoseconds age = now - std::chrono::nanoseconds(std::max(state[1], state[2]));
    if (age.count() >= 0 && age < tick) std::this_thread::sleep_for(tick - age);
}

/// What is wrong with a graph's contents, "" if nothing. `entries`: the files that it may refer to.
std::string problem_inside(const PlainFile& file, const std::vector<FileEntry>& entries, bool safe) {
    const std::optional<Contents> found = file.contents();
    if (!found) return "not an ONNX graph";
    if (found->longest > most_in_a_row)
        return "a list of " + std::to_string(found->longest) + " integers, " + std::to_string(most_in_a_row) + " are the most";
    for (const std::string& name : found->names)
        if (std::none_of(entries.begin(), entries.end(), [&](const FileEntry& entry) { return entry.path == name; }))
            return "the graph takes data from `" + name.substr(0, 80) + "`, which `files` does not list";
    if (safe && found->is_nested) return "the graph has loops, branches or functions, which safe mode refuses; " + std::string(safe_remedy);
    return "";
}

/// What is wrong with a file, "" if nothing; a good file's state goes into `held`, and its stamp into `seen`, if it is hashed at all.
std::string problem(Held& held, const FileEntry& entry, const std::vector<FileEntry>* of_graph, const Json& stamps, Json* seen, bool safe) {
    const fs::path directory = held.place(), path = directory / entry.path;
    std::error_code error;
    if (leads_out(path, directory)) return "a link that leads out of the bundle";
    if (!fs::is_regular_file(path, error)) return "missing";
    PlainFile file(path);
    if (!file.is_open()) return "not readable";
    if (file.state.st_size != entry.size)
        return std::to_string(file.state.st_size) + " bytes, the manifest says " + std::to_string(entry.size);
    const State state = state_of(file.state);
    const Json now = stamp(state, entry);
    const auto before = stamps.find(entry.path);
    if (before == stamps.end() || *before != now) {
        settle(state);
        if (seen != nullptr) {
            const std::optional<std::string> found = hash(file);
            if (!found) return "not readable";
            if (*found != entry.sha256) return "its content does not match the manifest's sha256";
        }
        if (of_graph != nullptr)
            if (std::string inside = problem_inside(file, *of_graph, safe); !inside.empty()) return inside;
        if (file.now() != state) return "was written to while it was read";
    }
    if (seen != nullptr) (*seen)[entry.path] = now;
    held.states[entry.path] = state;
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

std::optional<Contents> PlainFile::contents() const {
    const auto size = static_cast<std::size_t>(state.st_size);
    void* data = file_ < 0 || size == 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file_, 0);
    if (data == MAP_FAILED) return std::nullopt;
    const std::shared_ptr<void> owner(data, [size](void* mapped) { munmap(mapped, size); });
    return graph_contents({static_cast<const char*>(data), size});
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

std::optional<State> PlainFile::now() const {
    struct stat found{};
    return file_ >= 0 && fstat(file_, &found) == 0 ? std::optional(state_of(found)) : std::nullopt;
}

void verify(Held& held, const Manifest& manifest, Verify how, bool safe) {
    const bool hashes = how != Verify::never || safe;
    const std::vector<FileEntry>& entries = manifest.files;
    std::set<std::string> graphs;
    for (const Variant& variant : manifest.variants)
        if (variant.engine)
            graphs.insert(variant.engine->graph);
        else if (!variant.is_engine())
            graphs.insert(variant.file);
    const fs::path& directory = held.directory();
    const std::optional<fs::path> place = safe || !hashes ? std::nullopt : stamp_file(directory);
    const Json stamps = how == Verify::once && place ? read_stamps(*place) : Json::object();
    Json seen = Json::object();
    std::string problems;
    for (const FileEntry& entry : entries) {
        const std::string found =
            problem(held, entry, graphs.count(entry.path) > 0 ? &entries : nullptr, stamps, hashes ? &seen : nullptr, safe);
        if (!found.empty()) problems += "\n  " + entry.path + ": " + found;
    }
    if (!problems.empty())
        throw BundleError(directory.string() + ": damaged or incomplete:" + problems + "\n  copy or export the bundle again");
    if (place && seen != stamps) write_stamps(*place, seen);
}

} // namespace mars
