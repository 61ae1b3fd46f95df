// A file mapped into memory.
#pragma once

#include <cstddef>
#include <filesystem>

namespace mars {

/// Mapping needs memory once, reading a copy twice. Empty files have no data.
class MappedFile {
  public:
    /// Throws BundleError if it is not a regular file or cannot be mapped.
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const void* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

} // namespace mars
