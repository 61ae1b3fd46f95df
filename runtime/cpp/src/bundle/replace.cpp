// Scratch directories, links, locks, and the exchange of two directories.
#include "bundle/replace.hpp"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <mars/errors.hpp>

namespace mars {

namespace fs = std::filesystem;

namespace {

constexpr auto writers_wait = std::chrono::seconds(30);
constexpr auto pause_between = std::chrono::milliseconds(10);
constexpr std::string_view partial = ".partial", replaced = ".replaced";
constexpr std::size_t num_random = 8;
constexpr unsigned exchange = 2; // RENAME_EXCHANGE

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
    throw BundleError(path.string() + ": " + what + " (" + std::strerror(errno) + "); what was there before is unchanged");
}

int open_directory(const fs::path& path) { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW); }

/// Remove what killed runs left beside a bundle that is there, Python's included: scratch directories that nobody has locked.
void sweep(const fs::path& bundle) {
    const std::string front = "." + bundle.filename().string() + "-";
    std::error_code error;
    std::vector<fs::path> found;
    for (const fs::directory_entry& each : fs::directory_iterator(bundle.parent_path(), error)) {
        const std::string name = each.path().filename().string();
        for (const std::string_view end : {partial, replaced})
            if (name.size() == front.size() + num_random + end.size() && name.compare(0, front.size(), front) == 0 &&
                name.compare(front.size() + num_random, end.size(), end) == 0)
                found.push_back(each.path());
    }
    for (const fs::path& path : found) {
        const int lock = open_directory(path);
        if (lock < 0) continue;
        if (flock(lock, LOCK_EX | LOCK_NB) == 0) fs::remove_all(path, error);
        close(lock);
    }
}

} // namespace

WriterLock::WriterLock(const fs::path& directory) : handle_(open_directory(fs::canonical(directory))) {
    if (handle_ < 0) throw BundleError(directory.string() + ": cannot be opened (" + std::strerror(errno) + ")");
    const auto end = std::chrono::steady_clock::now() + writers_wait;
    while (flock(handle_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        if (std::chrono::steady_clock::now() > end) {
            close(handle_);
            throw BundleError(directory.string() + ": another program has been writing to it for 30 s; try again");
        }
        std::this_thread::sleep_for(pause_between);
    }
}

WriterLock::~WriterLock() { close(handle_); }

Successor::Successor(const fs::path& bundle) : bundle_(fs::canonical(bundle)) {
    sweep(bundle_);
    while (lock_ < 0) {
        // As Python names them, which finds by that what was left.
        std::string random(num_random, 'a');
        const int source = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
        if (source >= 0) {
            if (::read(source, random.data(), random.size()) < 0) random.assign(num_random, 'a');
            close(source);
        }
        for (char& c : random) c = "abcdefghijklmnopqrstuvwxyz012345"[static_cast<unsigned char>(c) % 32];
        scratch_ = bundle_.parent_path() / ("." + bundle_.filename().string() + "-" + random + std::string(partial));
        if (mkdir(scratch_.c_str(), 0755) != 0) {
            if (errno == EEXIST) continue;
            fail(bundle_.parent_path(), "cannot be written to");
        }
        lock_ = open_directory(scratch_);
        if (lock_ >= 0) flock(lock_, LOCK_EX | LOCK_NB);
        std::error_code error;
        if (!fs::is_directory(scratch_, error)) { // somebody swept it away before it was locked
            if (lock_ >= 0) close(lock_);
            lock_ = -1;
        }
    }
}

Successor::~Successor() {
    std::error_code error;
    if (!scratch_.empty()) fs::remove_all(scratch_, error);
    if (lock_ >= 0) close(lock_);
}

void Successor::take(const std::string& name) {
    std::error_code error;
    const fs::path source = fs::canonical(bundle_ / name, error);
    if (!error) fs::create_hard_link(source, scratch_ / name, error);
    if (!error) return;
    if (!fs::copy_file(bundle_ / name, scratch_ / name, error)) {
        errno = error.value();
        fail(scratch_ / name, "cannot be written");
    }
}

void Successor::write(const std::string& name, const void* data, std::size_t num_bytes) {
    const fs::path path = scratch_ / name;
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0) fail(path, "cannot be written");
    const auto* bytes = static_cast<const char*>(data);
    bool good = true;
    while (good && num_bytes > 0) {
        const ssize_t done = ::write(file, bytes, num_bytes);
        if (done < 0 && errno == EINTR) continue;
        good = done > 0;
        bytes += good ? done : 0;
        num_bytes -= good ? static_cast<std::size_t>(done) : 0;
    }
    good = good && fsync(file) == 0;
    const int error = errno;
    close(file);
    errno = error;
    if (!good) fail(path, "cannot be written");
}

void Successor::commit() {
    fsync(lock_);
    if (syscall(SYS_renameat2, AT_FDCWD, scratch_.c_str(), AT_FDCWD, bundle_.c_str(), exchange) == 0) return;
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP && errno != EPERM) fail(bundle_, "cannot be replaced");
    const std::string name = scratch_.string();
    const fs::path aside = name.substr(0, name.size() - partial.size()) + std::string(replaced);
    if (rename(bundle_.c_str(), aside.c_str()) != 0) fail(bundle_, "cannot be replaced");
    if (rename(scratch_.c_str(), bundle_.c_str()) != 0) {
        const int error = errno;
        rename(aside.c_str(), bundle_.c_str());
        errno = error;
        fail(bundle_, "cannot be replaced");
    }
    scratch_ = aside;
}

} // namespace mars
