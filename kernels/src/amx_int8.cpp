#include <algorithm>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "quantize_avx512.hpp"
#include "tile.hpp"

namespace {

// A register is a tile of up to 16 lines of 64 bytes. Tiles 0 to 3 are the sums of 16 rows and 16 columns: upper left, upper right, lower
// left, lower right. 4 and 5 are 64 codes of each upper and each lower row; 6 and 7 are 16 groups of weights of each left and each right
// column. So each tile that is loaded is used twice.
constexpr size_t SUMS = 32, INPUTS = 64, MOST_ROWS = 32, LINES = 16; // SUMS: of a row

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

// Weights of 32 columns in bytes
struct ByteWeights : ByteSizes<32, INPUTS, MOST_ROWS> {

    void load(const int8_t* block, size_t, bool) {
        _tile_loadd(6, block, LINE);
        _tile_loadd(7, block + 64, LINE);
    }
    static void multiply_upper() {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
    }
    static void multiply_lower() {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }

    static void store(const Packed& weights, size_t column, const int32_t* sums, float largest, float* out, uint32_t columns) {
        Half(weights, column).store(_mm512_load_si512(sums), largest, out, static_cast<__mmask16>(columns));
        Half(weights, column + 16).store(_mm512_load_si512(sums + 16), largest, out + 16, static_cast<__mmask16>(columns >> 16));
    }
};

// Weights of 16 columns in four bits become integers, multiplier * (code - zero point), in two planes: their lower bytes, unsigned, instead of
// left columns, and their upper bytes, signed, instead of right ones. A block is decoded while the one before it is multiplied, because what
// was written cannot be read at once.
struct FourBitWeights : FourBitSizes<16, MOST_ROWS> {
    static constexpr size_t FEW_ROWS = 5; // for which AVX-512 is faster
    alignas(64) int8_t lower[2][INPUTS * COLUMNS], upper[2][INPUTS * COLUMNS];

    void load(const int8_t* block, size_t i, bool is_last) {
        if (i == 0) decode(block, lower[0], upper[0]);
        if (!is_last) decode(block + LAYOUT.block_bytes, lower[(i + 1) % 2], upper[(i + 1) % 2]);
        _tile_loadd(6, lower[i % 2], 64);
        _tile_loadd(7, upper[i % 2], 64);
    }
    static void multiply_upper() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
    }
    static void multiply_lower() {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }

    static void decode(const int8_t* block, int8_t* lower, int8_t* upper) {
        const auto* factors = reinterpret_cast<const __m256i*>(block + INPUTS / 2 * COLUMNS);
        const __m512i multipliers = _mm512_cvtepu16_epi32(_mm256_loadu_si256(factors)); // of both groups, in the two lower bytes
        const __m512i zero_points = _mm512_cvtepu16_epi32(_mm256_loadu_si256(factors + 1));
        const __m512i low = _mm512_set1_epi8(15), first = _mm512_set1_epi32(0xff);
        for (size_t group = 0, line = 0; group < 2; ++group) {
            const auto repeated = [&](__m512i bytes, int of_four) {
                return _mm512_mullo_epi32(_mm512_and_si512(_mm512_srli_epi32(bytes, 8 * group), first), _mm512_set1_epi32(of_four));
            };
            const __m512i even = repeated(multipliers, 0x00010001), odd = _mm512_slli_epi32(even, 8);
            const __m512i zeros = repeated(zero_points, 0x01010101);
            const auto store = [&](size_t to, __m512i codes) {
                constexpr uint64_t ODD = 0xaaaaaaaaaaaaaaaa;
                const __m512i weights = _mm512_sub_epi8(codes, zeros);
                const __m512i evens = _mm512_maddubs_epi16(even, weights), odds = _mm512_maddubs_epi16(odd, weights);
                _mm512_store_si512(lower + to * 64, _mm512_mask_blend_epi8(ODD, evens, _mm512_slli_epi16(odds, 8)));
                _mm512_store_si512(upper + to * 64, _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16(evens, 8), odds));
            };
            for (size_t i = 0; i < 4; ++i, ++line) {
                const __m512i both = _mm512_loadu_si512(block + line * 64);
                store(group * 8 + i, _mm512_and_si512(both, low));
                store(group * 8 + i + 4, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
            }
        }
    }

    static void store(const Packed& weights, size_t column, const int32_t* sums, float largest, float* out, uint32_t columns) {
        const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(sums + 16), 8);
        Half(weights, column).store(_mm512_add_epi32(_mm512_load_si512(sums), upper), largest, out, static_cast<__mmask16>(columns));
    }
};

// Sums [rows, SUMS] of a panel.
template <class Weights, bool HasLower, bool IsFirst>
void add_up(const int8_t* block, const uint8_t* codes, size_t num_blocks, size_t rows, int32_t* sums) {
    Weights weights;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t i = 0; i < num_blocks; ++i, block += Weights::LAYOUT.block_bytes, codes += rows * INPUTS) {
        if (IsFirst)
            for (size_t line = 0; line < Weights::LAYOUT.block_bytes; line += 64) __builtin_prefetch(block + AHEAD + line);
        weights.load(block, i, i + 1 == num_blocks);
        _tile_loadd(4, codes, INPUTS);
        Weights::multiply_upper();
        if (!HasLower) continue;
        _tile_loadd(5, codes + LINES * INPUTS, INPUTS);
        Weights::multiply_lower();
    }
    _tile_stored(0, sums, SUMS * 4);
    _tile_stored(1, sums + 16, SUMS * 4);
    if (!HasLower) return;
    _tile_stored(2, sums + LINES * SUMS, SUMS * 4);
    _tile_stored(3, sums + LINES * SUMS + 16, SUMS * 4);
}

template <class Weights>
void multiply_tiles(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from, size_t to) {
    const size_t tiles = weights.num_tiles(rows), num_blocks = weights.num_blocks;
    alignas(64) int32_t sums[2][MOST_ROWS * SUMS]; // of a panel and the one before it: written sums cannot be read at once
    for (size_t t = 0; t < tiles; ++t) {
        const size_t first = weights.first_row(t, rows), count = weights.first_row(t + 1, rows) - first;
        const bool has_lower = count > LINES;
        const Tiles registers(has_lower ? LINES : count, has_lower ? count - LINES : 0);
        _tile_loadconfig(&registers);
        const auto add = has_lower ? (t ? add_up<Weights, true, false> : add_up<Weights, true, true>)
                                   : (t ? add_up<Weights, false, false> : add_up<Weights, false, true>);
        for (size_t p = from; p <= to; ++p) {
            const uint8_t* rows_of_tile = codes + first * weights.row_bytes;
            if (p < to) add(weights.panels + p * weights.panel_bytes, rows_of_tile, num_blocks, count, sums[p % 2]);
            if (p == from) continue;
            const size_t column = (p - 1) * Weights::COLUMNS, columns = std::min(Weights::COLUMNS, weights.outputs - column);
            const auto is_there = static_cast<uint32_t>((uint64_t{1} << columns) - 1);
            for (size_t row = 0; row < count; ++row)
                Weights::store(weights, column, sums[(p - 1) % 2] + row * SUMS, largest[first + row],
                               out + (first + row) * weights.outputs + column, is_there);
        }
    }
    _tile_release();
}

void multiply_four_bits(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from,
                        size_t to) {
    const bool is_few = rows <= FourBitWeights::FEW_ROWS;
    const auto multiply = is_few ? mars::kernels::avx512_vnni.four_bits->multiply : multiply_tiles<FourBitWeights>;
    multiply(weights, codes, largest, rows, out, from, to);
}

// Linux gives a process these registers, which are large, when it asks for them.
bool is_here() {
    constexpr long ASK = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = mars::kernels::Processor().amx_int8 && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return allowed;
}

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits =
    set_of<FourBitWeights, multiply_four_bits>("amx_int8", is_here, quantize_groups<quantize_avx512<INPUTS, true>>);
const InstructionSet amx_int8 =
    set_of<ByteWeights, multiply_tiles<ByteWeights>>("amx_int8", is_here, quantize_avx512<INPUTS, false>, &four_bits);
} // namespace mars::kernels
