#include <algorithm>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "quantize_avx512.hpp"
#include "tile.hpp"

namespace {

using mars::kernels::FourBits;

// A register is a tile of up to 16 lines of 64 bytes. Tiles 0 to 3 are the sums of 16 rows and 16 columns: upper left, upper right, lower
// left, lower right. 4 and 5 are 64 codes of each upper and each lower row; 6 and 7 are 16 groups of weights of each left and each right
// column. So each tile that is loaded is used twice.
constexpr size_t COLUMNS = 32, INPUTS = 64, MOST_ROWS = 32, LINES = 16;

struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {};

    Tiles(size_t upper, size_t lower) {
        for (const int tile : {0, 1, 4}) lines[tile] = static_cast<uint8_t>(upper);
        for (const int tile : {2, 3, 5}) lines[tile] = static_cast<uint8_t>(lower ? lower : 1);
        lines[6] = lines[7] = LINES;
    }
};

// Sums [rows, COLUMNS] of a panel.
template <bool HasLower, bool IsFirst>
void add_up(const int8_t* block, const uint8_t* codes, size_t num_blocks, size_t rows, int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t i = 0; i < num_blocks; ++i, block += INPUTS * COLUMNS, codes += rows * INPUTS) {
        if (IsFirst)
            for (size_t line = 0; line < INPUTS * COLUMNS; line += 64) __builtin_prefetch(block + AHEAD + line);
        _tile_loadd(6, block, COLUMNS * 4);
        _tile_loadd(7, block + 64, COLUMNS * 4);
        _tile_loadd(4, codes, INPUTS);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (!HasLower) continue;
        _tile_loadd(5, codes + LINES * INPUTS, INPUTS);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + 16, COLUMNS * 4);
    if (!HasLower) return;
    _tile_stored(2, sums + LINES * COLUMNS, COLUMNS * 4);
    _tile_stored(3, sums + LINES * COLUMNS + 16, COLUMNS * 4);
}

// 16 columns, whose sums become numbers
struct Half {
    const __m512i middles;
    const __m512 steps;

    Half(const Packed& weights, size_t column)
        : middles(_mm512_loadu_si512(weights.middles.data() + column)), steps(_mm512_loadu_ps(weights.steps.data() + column)) {}

    void store(__m512i sums, float largest, float* place, __mmask16 columns) const {
        const __m512 units = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, middles));
        _mm512_mask_storeu_ps(place, columns, _mm512_mul_ps(_mm512_mul_ps(units, steps), _mm512_set1_ps(largest)));
    }
};

// Columns from `column` on of out [rows, outputs].
void store(const Packed& weights, const int32_t* sums, const float* largest, size_t rows, float* out, size_t column) {
    const auto is_there = static_cast<uint32_t>((uint64_t{1} << std::min(COLUMNS, weights.outputs - column)) - 1);
    const Half left(weights, column), right(weights, column + 16);
    out += column;
    for (size_t row = 0; row < rows; ++row, sums += COLUMNS, out += weights.outputs) {
        left.store(_mm512_load_si512(sums), largest[row], out, static_cast<__mmask16>(is_there));
        right.store(_mm512_load_si512(sums + 16), largest[row], out + 16, static_cast<__mmask16>(is_there >> 16));
    }
}

// Weights of four bits become integers, multiplier * (code - zero point), in two planes: their lower bytes, unsigned, and their upper bytes,
// signed. Tiles 0 and 1 are the sums of upper rows and both planes, 2 and 3 those of lower rows.
constexpr size_t FOUR_BIT_COLUMNS = 16, FEW_ROWS = 5; // for which AVX-512 is faster
constexpr size_t BLOCK_BYTES = FourBits::bytes(FOUR_BIT_COLUMNS);

struct alignas(64) Planes {
    int8_t lower[INPUTS * FOUR_BIT_COLUMNS], upper[INPUTS * FOUR_BIT_COLUMNS];

    void decode(const int8_t* block) {
        const auto* factors = reinterpret_cast<const __m256i*>(block + INPUTS / 2 * FOUR_BIT_COLUMNS);
        const __m512i multipliers = _mm512_cvtepu16_epi32(_mm256_load_si256(factors)); // of both groups, in the two lower bytes
        const __m512i below = _mm512_cvtepu16_epi32(_mm256_load_si256(factors + 1));
        const __m512i low = _mm512_set1_epi8(15), first = _mm512_set1_epi32(0xff);
        for (size_t group = 0, line = 0; group < 2; ++group) {
            const auto repeated = [&](__m512i bytes, int of_four) {
                return _mm512_mullo_epi32(_mm512_and_si512(_mm512_srli_epi32(bytes, 8 * group), first), _mm512_set1_epi32(of_four));
            };
            const __m512i even = repeated(multipliers, 0x00010001), odd = _mm512_slli_epi32(even, 8);
            const __m512i zeros = _mm512_sub_epi8(repeated(below, 0x01010101), _mm512_set1_epi8(8));
            const auto store = [&](size_t to, __m512i codes) {
                constexpr uint64_t ODD = 0xaaaaaaaaaaaaaaaa;
                const __m512i weights = _mm512_add_epi8(codes, zeros);
                const __m512i evens = _mm512_maddubs_epi16(even, weights), odds = _mm512_maddubs_epi16(odd, weights);
                _mm512_store_si512(lower + to * 64, _mm512_mask_blend_epi8(ODD, evens, _mm512_slli_epi16(odds, 8)));
                _mm512_store_si512(upper + to * 64, _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16(evens, 8), odds));
            };
            for (size_t i = 0; i < 4; ++i, ++line) {
                const __m512i both = _mm512_load_si512(block + line * 64);
                store(group * 8 + i, _mm512_and_si512(both, low));
                store(group * 8 + i + 4, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
            }
        }
    }
};

using PlaneSums = int32_t[2][MOST_ROWS * FOUR_BIT_COLUMNS];

// Sums of a panel. A block is decoded while the one before it is multiplied, because what was written cannot be read at once.
template <bool HasLower, bool IsFirst>
void add_up_planes(const int8_t* block, const uint8_t* codes, size_t num_blocks, size_t rows, PlaneSums& sums) {
    Planes planes[2];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    planes[0].decode(block);
    for (size_t i = 0; i < num_blocks; ++i, block += BLOCK_BYTES, codes += rows * INPUTS) {
        if (IsFirst)
            for (size_t line = 0; line < BLOCK_BYTES; line += 64) __builtin_prefetch(block + AHEAD + line);
        if (i + 1 < num_blocks) planes[(i + 1) % 2].decode(block + BLOCK_BYTES);
        _tile_loadd(6, planes[i % 2].lower, 64);
        _tile_loadd(7, planes[i % 2].upper, 64);
        _tile_loadd(4, codes, INPUTS);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (!HasLower) continue;
        _tile_loadd(5, codes + LINES * INPUTS, INPUTS);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (!HasLower) return;
    _tile_stored(2, sums[0] + LINES * FOUR_BIT_COLUMNS, 64);
    _tile_stored(3, sums[1] + LINES * FOUR_BIT_COLUMNS, 64);
}

void multiply_four_bits(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from,
                        size_t to) {
    if (rows <= FEW_ROWS) return mars::kernels::avx512_vnni.four_bits->multiply(weights, codes, largest, rows, out, from, to);
    const size_t tiles = weights.num_tiles(rows), num_blocks = weights.padded_inputs() / INPUTS;
    alignas(64) PlaneSums sums[2]; // of a panel and the one before it
    for (size_t t = 0; t < tiles; ++t) {
        const size_t first = weights.first_row(t, rows), count = weights.first_row(t + 1, rows) - first;
        const bool has_lower = count > LINES;
        const Tiles registers(has_lower ? LINES : count, has_lower ? count - LINES : 0);
        _tile_loadconfig(&registers);
        const auto add = has_lower ? (t ? add_up_planes<true, false> : add_up_planes<true, true>)
                                   : (t ? add_up_planes<false, false> : add_up_planes<false, true>);
        for (size_t p = from; p <= to; ++p) {
            if (p < to)
                add(weights.blocks.get() + p * weights.panel_bytes, codes + first * weights.row_bytes, num_blocks, count, sums[p % 2]);
            if (p == from) continue;
            const size_t column = (p - 1) * FOUR_BIT_COLUMNS, columns = std::min(FOUR_BIT_COLUMNS, weights.outputs - column);
            const Half half(weights, column);
            for (size_t row = 0; row < count; ++row) {
                int32_t *lower = sums[(p - 1) % 2][0] + row * FOUR_BIT_COLUMNS, *upper = sums[(p - 1) % 2][1] + row * FOUR_BIT_COLUMNS;
                const __m512i sum = _mm512_add_epi32(_mm512_load_si512(lower), _mm512_slli_epi32(_mm512_load_si512(upper), 8));
                half.store(sum, largest[first + row], out + (first + row) * weights.outputs + column,
                           static_cast<__mmask16>((1u << columns) - 1));
            }
        }
    }
    _tile_release();
}

void multiply_tiles(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from, size_t to) {
    const size_t width = weights.padded_inputs(), tiles = weights.num_tiles(rows), num_blocks = width / INPUTS;
    alignas(64) int32_t sums[2][MOST_ROWS * COLUMNS]; // of a panel and the one before it: written sums cannot be read at once
    for (size_t t = 0; t < tiles; ++t) {
        const size_t first = weights.first_row(t, rows), count = weights.first_row(t + 1, rows) - first;
        const bool has_lower = count > LINES;
        const Tiles registers(has_lower ? LINES : count, has_lower ? count - LINES : 0);
        _tile_loadconfig(&registers);
        const auto add = has_lower ? (t ? add_up<true, false> : add_up<true, true>) : (t ? add_up<false, false> : add_up<false, true>);
        for (size_t p = from; p <= to; ++p) {
            if (p < to) add(weights.blocks.get() + p * width * COLUMNS, codes + first * width, num_blocks, count, sums[p % 2]);
            if (p > from) store(weights, sums[(p - 1) % 2], largest + first, count, out + first * weights.outputs, (p - 1) * COLUMNS);
        }
    }
    _tile_release();
}

// Linux gives a process these registers, which are large, when it asks for them.
bool is_here() {
    constexpr long ASK = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = mars::kernels::Processor().amx_int8 && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return allowed;
}

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits{"amx_int8",
                                      is_here,
                                      FOUR_BIT_COLUMNS,
                                      FourBits::BLOCK,
                                      FourBits::GROUP,
                                      MOST_ROWS,
                                      false,
                                      quantize_groups<quantize_avx512<INPUTS, true>>,
                                      multiply_four_bits};
const InstructionSet amx_int8{"amx_int8",     is_here,   COLUMNS, INPUTS, 4, MOST_ROWS, false, quantize_avx512<INPUTS, false>,
                              multiply_tiles, &four_bits};
} // namespace mars::kernels
