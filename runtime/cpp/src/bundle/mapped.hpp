// A whole file as it lies in the page cache.
#pragma once

#include <cstddef>
#include <filesystem>

namespace mars {

/// What is read is in host memory twice; what is mapped, once. Empty files have no data.
class MappedFile {
  public:
    /// Throws BundleError for what is not a plain file, or cannot be mapped.
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
