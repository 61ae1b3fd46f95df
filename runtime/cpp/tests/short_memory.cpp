// The program's operator new, which counts.
#include "short_memory.hpp"

#include <cstdlib>
#include <new>

namespace {

constexpr long plenty = -1;
thread_local long left_over = plenty;

} // namespace

ShortMemory::ShortMemory(long left) { left_over = left; }
ShortMemory::~ShortMemory() { left_over = plenty; }

bool ShortMemory::has_failed() const { return left_over == plenty; }

void* operator new(std::size_t size) {
    const bool fails = left_over == 0;
    if (left_over != plenty) --left_over;
    void* const memory = fails ? nullptr : std::malloc(size == 0 ? 1 : size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

// Replaced with the others: AddressSanitizer pairs an allocation with the operator that frees it.
void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
    try {
        return operator new(size);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept { std::free(memory); }
