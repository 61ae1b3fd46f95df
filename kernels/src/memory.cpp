#include "memory.hpp"

#include <algorithm>
#include <mutex>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
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

} // namespace mars::kernels
