// The directory of a bundle from when it was verified to when its files are used: the same ones, by device, inode, size and times. Reads no
// content.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace mars {

/// What tells one file, and one state of it, from another: size, times of writing and of change in nanoseconds, inode, device.
using State = std::array<std::int64_t, 5>;

State state_of(const struct stat& found);

/// A directory that stays open.
class Held {
  public:
    explicit Held(std::filesystem::path directory);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    const std::filesystem::path& directory() const { return directory_; }

    /// Leads to it, also after it was renamed, exchanged or moved away; where the system has no such names it is the directory's own.
    const std::filesystem::path& place() const { return place_; }

    /// Of each file as it was verified.
    std::map<std::string, State> states;

    /// Names of files that are no longer those that were verified, or no longer as they were then.
    std::vector<std::string> changed() const;

    /// Whether it is the same directory, by whatever name.
    bool is_same(const Held& other) const { return device_ == other.device_ && inode_ == other.inode_; }

  private:
    std::filesystem::path directory_, place_;
    int handle_;
    dev_t device_ = 0;
    ino_t inode_ = 0;
};

/// A file that a session has mapped. Cut short it takes the process down, written over it gives wrong answers: `check` says so before, where
/// it was done before.
class Watched {
  public:
    Watched() = default;

    /// `place` is where it is opened, `shown` what errors name.
    Watched(const std::filesystem::path& place, std::filesystem::path shown);
    ~Watched();
    Watched(Watched&& other) noexcept;
    Watched& operator=(Watched&& other) noexcept;

    /// Throws BundleError when the file was written to since.
    void check() const;

  private:
    std::filesystem::path shown_;
    int handle_ = -1;
    std::optional<State> state_;
};

} // namespace mars
