#include "attention_tile.hpp"

namespace {

struct Portable {
    static constexpr size_t LANES = 8, WIDTH = 16, ENTRIES = 16, QUERIES = 24;
    struct Vector {
        int32_t of[LANES];
    };

    static Vector load(const int32_t* from) {
        Vector made;
        std::memcpy(&made, from, sizeof made);
        return made;
    }
    static void store(int32_t* to, const Vector& x) { std::memcpy(to, &x, sizeof x); }
    static void store_scaled(float* to, const Vector& x, const float* scales) {
        for (size_t l = 0; l < LANES; ++l) to[l] = static_cast<float>(x.of[l]) * scales[l];
    }
    static int32_t pair(const int16_t* two) { return together(two[0], two[1]); }

    static Vector add_products(Vector sums, const Vector& pairs, int32_t two) {
        for (size_t l = 0; l < LANES; ++l)
            sums.of[l] += static_cast<int16_t>(pairs.of[l]) * static_cast<int16_t>(two) + (pairs.of[l] >> 16) * (two >> 16);
        return sums;
    }

    static void unpack_keys(const int8_t* first, size_t stride, int32_t* out) {
        for (size_t d = 0; d < CHUNK; d += 4)
            for (size_t half = 0; half < 2; ++half, out += LANES)
                for (size_t l = 0; l < LANES; ++l) out[l] = together(first[l * stride + d + half], first[l * stride + d + half + 2]);
    }

    static void unpack_values(const int8_t* first, const int8_t* second, int32_t* out) {
        for (size_t d = 0; d < CHUNK; ++d) out[d] = together(first[d], second[d]);
    }

    static int32_t together(int16_t low, int16_t high) {
        return static_cast<int32_t>(static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
    }
};

} // namespace

namespace mars::kernels {

const AttentionCode attention_portable{"portable", Portable::QUERIES, write, attend_tile<Portable>};

const AttentionCode& attention_code(const char* instructions) {
#ifdef __x86_64__
    for (const AttentionCode* code : {
#ifdef __linux__
             &attention_amx_int8,
#endif
             &attention_avx512_vnni, &attention_avx_vnni, &attention_avx2})
        if (std::strcmp(code->name, instructions) == 0) return *code;
#endif
    (void)instructions;
    return attention_portable;
}

} // namespace mars::kernels
