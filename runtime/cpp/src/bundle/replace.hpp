// A bundle's successor: a scratch directory beside it that takes its place when it is complete. Twin of exporter/output.py.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace mars {

/// The only writer of a directory among those that ask, for as long as it lives; of nothing where the file system knows no locks.
class WriterLock {
  public:
    /// Throws BundleError when another program keeps it for half a minute.
    explicit WriterLock(const std::filesystem::path& directory);
    ~WriterLock();
    WriterLock(const WriterLock&) = delete;
    WriterLock& operator=(const WriterLock&) = delete;

  private:
    int handle_;
};

/// A copy of a bundle's files, by another name for the same data where that is possible, in which some are replaced.
///
/// Its name and its lock are those of Python's scratch directories, so that each side clears away what a killed run of the other left.
class Successor {
  public:
    /// Throws BundleError when the place beside the bundle cannot be written.
    explicit Successor(const std::filesystem::path& bundle);
    ~Successor();
    Successor(const Successor&) = delete;
    Successor& operator=(const Successor&) = delete;

    /// Have the bundle's file here, too.
    void take(const std::string& name);

    /// A new file, on the disk when this returns. Throws BundleError.
    void write(const std::string& name, const void* data, std::size_t num_bytes);

    /// Let both change places at once, or where the system cannot do that, one after the other; the old one is gone afterwards.
    void commit();

  private:
    std::filesystem::path bundle_, scratch_;
    int lock_ = -1;
};

} // namespace mars
