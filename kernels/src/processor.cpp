// Not `__builtin_cpu_supports`: with the compiler of the wheels (zig) it answers no.
#include <cpuid.h>

#include "product.hpp"

namespace mars::kernels {

Processor::Processor() {
    unsigned a, b, c, d, most, state, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0 || !__get_cpuid_count(7, 0, &most, &b, &c, &d)) return;
    __asm__("xgetbv" : "=a"(state), "=d"(unused) : "c"(0));
    const bool saves_ymm = (state & 0x06) == 0x06, saves_zmm = (state & 0xe6) == 0xe6, saves_tiles = (state & 0x60000) == 0x60000;
    const unsigned avx512 = 1u << 16 | 1u << 30 | 1u << 31, amx = 1u << 24 | 1u << 25; // F, BW, VL; tiles of bytes
    avx2 = saves_ymm && (b & 1u << 5) != 0;
    avx512_vnni = saves_zmm && (b & avx512) == avx512 && (c & 1u << 11) != 0;
    amx_int8 = avx512_vnni && saves_tiles && (d & amx) == amx; // a hypervisor may hide VNNI, which attention uses too
    avx_vnni = avx2 && most > 0 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}

} // namespace mars::kernels
