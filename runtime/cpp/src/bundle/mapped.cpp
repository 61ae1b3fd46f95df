#include "bundle/mapped.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mars/errors.hpp>

namespace mars {

MappedFile::MappedFile(const std::filesystem::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat state{};
    bool good = file >= 0 && fstat(file, &state) == 0 && S_ISREG(state.st_mode);
    if (good && state.st_size > 0) {
        size_ = static_cast<std::size_t>(state.st_size);
        data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
        good = data_ != MAP_FAILED;
    }
    if (file >= 0) close(file);
    if (!good) throw BundleError(path.string() + ": not readable; copy or build the bundle again");
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
}

} // namespace mars
