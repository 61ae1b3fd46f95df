#include "memory.hpp"

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>
#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace mars::kernels {

namespace {

constexpr size_t LINE = 64, PAGE = 1 << 21, CHUNK = 16 * PAGE; // untouched pages of a chunk cost nothing

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Chunk {
    const size_t size;
    int8_t* const memory;
    size_t used = 0;

    explicit Chunk(size_t bytes) : size(bytes), memory(static_cast<int8_t*>(::operator new(size, std::align_val_t{PAGE}))) {
#ifdef MADV_HUGEPAGE
        madvise(memory, size, MADV_HUGEPAGE); // without it the weights are only slower
#endif
    }
    Chunk(const Chunk&) = delete;
    ~Chunk() { ::operator delete(memory, std::align_val_t{PAGE}); }
};

} // namespace

std::shared_ptr<int8_t> weight_memory(size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Chunk> last;
    const std::lock_guard<std::mutex> lock(mutex);
    bytes = rounded_up(bytes, LINE);
    std::shared_ptr<Chunk> chunk = last.lock();
    if (!chunk || chunk->size - chunk->used < bytes) {
        chunk = std::make_shared<Chunk>(std::max(CHUNK, rounded_up(bytes, PAGE)));
        last = chunk;
    }
    int8_t* const place = chunk->memory + chunk->used;
    chunk->used += bytes;
    return {chunk, place};
}

void drop_file_pages([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef __linux__
    // Of each page: whether it is here, is swapped, is a file's. A page of a private mapping that was written is not a file's.
    constexpr uint64_t HERE = uint64_t{1} << 63, SWAPPED = uint64_t{1} << 62, OF_A_FILE = uint64_t{1} << 61;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<size_t>(memory);
    const size_t first = (begin + page - 1) / page, end = (begin + bytes) / page;
    if (first >= end) return;
    std::vector<uint64_t> states(end - first, SWAPPED);
    const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    const auto size = static_cast<ssize_t>(states.size() * sizeof(uint64_t));
    const bool is_read = file >= 0 && pread(file, states.data(), size, static_cast<off_t>(first * sizeof(uint64_t))) == size;
    if (file >= 0) close(file);
    const auto stays = [](uint64_t state) { return (state & SWAPPED) != 0 || ((state & HERE) != 0 && (state & OF_A_FILE) == 0); };
    if (is_read && std::none_of(states.begin(), states.end(), stays))
        madvise(reinterpret_cast<void*>(first * page), (end - first) * page, MADV_DONTNEED);
#endif
}

} // namespace mars::kernels
