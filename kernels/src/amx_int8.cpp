#include <algorithm>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "product.hpp"
#include "quantize_avx512.hpp"

namespace {

using mars::kernels::Packed;

// A register is a tile of up to 16 lines of 64 bytes. Tiles 0 to 3 are the sums of 16 rows and 16 columns: upper left, upper right, lower
// left, lower right. 4 and 5 are 64 codes of each upper and each lower row; 6 and 7 are 16 groups of weights of each left and each right
// column. So each tile that is loaded is used twice.
constexpr size_t COLUMNS = 32, INPUTS = 64, MOST_ROWS = 32, LINES = 16;
constexpr size_t AHEAD = 4096; // bytes of weights that are fetched before they are needed

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

    void store(const int32_t* sums, float largest, float* place, __mmask16 columns) const {
        const __m512 units = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), middles));
        _mm512_mask_storeu_ps(place, columns, _mm512_mul_ps(_mm512_mul_ps(units, steps), _mm512_set1_ps(largest)));
    }
};

// Columns from `column` on of out [rows, outputs].
void store(const Packed& weights, const int32_t* sums, const float* largest, size_t rows, float* out, size_t column) {
    const auto is_there = static_cast<uint32_t>((uint64_t{1} << std::min(COLUMNS, weights.outputs - column)) - 1);
    const Half left(weights, column), right(weights, column + 16);
    out += column;
    for (size_t row = 0; row < rows; ++row, sums += COLUMNS, out += weights.outputs) {
        left.store(sums, largest[row], out, static_cast<__mmask16>(is_there));
        right.store(sums + 16, largest[row], out + 16, static_cast<__mmask16>(is_there >> 16));
    }
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
const InstructionSet amx_int8{"amx_int8", is_here, COLUMNS, INPUTS, 4, MOST_ROWS, false, quantize_avx512<INPUTS, false>, multiply_tiles};
}
