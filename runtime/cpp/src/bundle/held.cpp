// What fstat says, compared.
#include "bundle/held.hpp"

#include <algorithm>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"

namespace mars {

namespace fs = std::filesystem;

State state_of(const struct stat& found) {
    const auto nanoseconds = [](const timespec& time) { return std::int64_t{time.tv_sec} * 1000000000 + time.tv_nsec; };
    return {std::int64_t{found.st_size}, nanoseconds(found.st_mtim), nanoseconds(found.st_ctim), static_cast<std::int64_t>(found.st_ino),
            static_cast<std::int64_t>(found.st_dev)};
}

Held::Held(fs::path directory)
    : directory_(std::move(directory)), place_(directory_), handle_(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    struct stat own{}, named{};
    if (handle_ < 0 || fstat(handle_, &own) != 0) return; // whoever reads in it says so
    device_ = own.st_dev;
    inode_ = own.st_ino;
    const fs::path opened = "/proc/self/fd/" + std::to_string(handle_); // Linux's name of what this process has opened
    if (stat(opened.c_str(), &named) == 0 && named.st_dev == device_ && named.st_ino == inode_) place_ = opened;
}

Held::~Held() {
    if (handle_ >= 0) close(handle_);
}

std::vector<std::string> Held::changed() const {
    std::vector<std::string> names;
    for (const auto& [name, state] : states) {
        struct stat now{};
        if (stat((place_ / name).c_str(), &now) != 0 || state_of(now) != state) names.push_back(name);
    }
    return names;
}

Watched::Watched(const fs::path& place, fs::path shown)
    : shown_(std::move(shown)), handle_(open(place.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    struct stat now{};
    if (handle_ >= 0 && fstat(handle_, &now) == 0) state_ = state_of(now);
}

Watched::~Watched() {
    if (handle_ >= 0) close(handle_);
}

Watched::Watched(Watched&& other) noexcept
    : shown_(std::move(other.shown_)), handle_(std::exchange(other.handle_, -1)), state_(std::exchange(other.state_, std::nullopt)) {}

Watched& Watched::operator=(Watched&& other) noexcept {
    std::swap(shown_, other.shown_);
    std::swap(handle_, other.handle_);
    std::swap(state_, other.state_);
    return *this;
}

void Watched::check() const {
    struct stat now{};
    if (!state_ || fstat(handle_, &now) != 0) return;
    const State state = state_of(now);
    if (state[0] != (*state_)[0] || state[1] != (*state_)[1])
        throw BundleError(
            shown_.string() +
            ": was written to while it is in use; open the bundle again (a bundle is replaced by renaming, never written over)");
}

fs::path Bundle::place(const std::string& name) const { return (held ? held->place() : path) / name; }

std::string Bundle::read(const std::string& name, std::size_t limit) const {
    const std::string where = (path / name).string();
    const std::optional<std::string> content = PlainFile(place(name)).read(limit);
    if (!content) throw BundleError(where + ": cannot be read; open the bundle again");
    Sha256 digest;
    digest.add(*content);
    const std::string found = digest.hex();
    const auto is_it = [&](const FileEntry& entry) { return entry.path == name && entry.sha256 == found; };
    if (held && std::none_of(manifest.files.begin(), manifest.files.end(), is_it))
        throw BundleError(where + ": was written to since the bundle was opened; open it again");
    return *content;
}

std::vector<std::string> Bundle::changed() const { return held ? held->changed() : std::vector<std::string>(); }

} // namespace mars
