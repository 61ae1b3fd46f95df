// A product in tiles of rows and panels of columns whose sums stay in registers. `Isa` has the instructions, for ROWS rows at a time.
// Included by one file for each instruction set, which is compiled for it; nothing here may be shared among them.
#pragma once

#include <cstring>
#include <utility>

#include "product.hpp"

namespace {

using mars::kernels::Packed;

constexpr size_t AHEAD = 4096; // bytes of weights that are fetched before they are needed; of four bits, which wait longer, a quarter

// Columns of a panel for one tile
struct Panel {
    const int8_t* blocks;
    size_t column; // the first of them
    const uint16_t* place;
    size_t num_blocks, num_together;
    const int32_t* middles;
    const float* steps;
};

// Of an Isa: how many columns, inputs and rows its instructions multiply at a time, and the most rows of a tile
template <size_t Columns, size_t Inputs, size_t MostRows, size_t Rows = 1>
struct ByteSizes {
    static constexpr size_t COLUMNS = Columns, INPUTS = Inputs, MOST_ROWS = MostRows, ROWS = Rows;
    static constexpr size_t LINE = 4 * mars::kernels::BYTES.columns; // bytes from four inputs to the next
    static constexpr bool ADDS_IN_16_BITS = false, IS_COPIED = false;
    static constexpr mars::kernels::Layout LAYOUT = mars::kernels::BYTES;
};

// The same, whose weights are copied into panels of so many columns
template <size_t Columns, size_t Inputs, size_t MostRows>
struct CopiedSizes : ByteSizes<Columns, Inputs, MostRows> {
    static constexpr size_t LINE = 4 * Columns;
    static constexpr bool IS_COPIED = true;
};

template <size_t Columns, size_t MostRows>
struct FourBitSizes {
    static constexpr bool IS_COPIED = false;
    static constexpr size_t COLUMNS = Columns, INPUTS = mars::kernels::BLOCK, MOST_ROWS = MostRows;
    static constexpr size_t LINE = 4 * mars::kernels::FOUR_BITS.columns;
    static constexpr mars::kernels::Layout LAYOUT = mars::kernels::FOUR_BITS;
};

// `tile` for weights of four bits, whose group is unpacked for all rows
template <class Isa, size_t Rows, bool IsFirst>
void four_bit_tile(const Panel& panel, const uint8_t* codes, const float* largest, float* out, size_t stride) {
    using mars::kernels::BLOCK, mars::kernels::GROUP, mars::kernels::GroupSums;
    constexpr size_t BYTES = Isa::LAYOUT.block_bytes, FACTORS = BLOCK / 8 * Isa::LINE;
    typename Isa::Sums sums[Rows] = {};
    const auto* of_codes = reinterpret_cast<const GroupSums*>(codes + panel.num_blocks * BLOCK * Rows);
    const int8_t* block = panel.blocks;
    for (size_t i = 0; i < panel.num_blocks; ++i, block += BYTES, codes += BLOCK * Rows, of_codes += Rows) {
        if (IsFirst && panel.column == 0)
            for (size_t line = 0; line < BYTES; line += 64) __builtin_prefetch(block + AHEAD / 4 + line);
        const typename Isa::Factors factors(block + FACTORS + 2 * panel.column);
#pragma GCC unroll 2
        for (size_t group = 0; group < 2; ++group) {
            const typename Isa::Weights weights(block + group * FACTORS / 2 + 4 * panel.column);
#pragma GCC unroll 16
            for (size_t r = 0; r < Rows; ++r)
                Isa::add(sums[r], weights, factors.of[group], codes + r * BLOCK + group * GROUP, of_codes[r].starts[group]);
        }
#pragma GCC unroll 16
        for (size_t r = 0; r < Rows; ++r) Isa::add_zeros(sums[r], factors, of_codes[r].of);
    }
#pragma GCC unroll 16
    for (size_t r = 0; r < Rows; ++r) Isa::store(sums[r], 0, panel.middles, panel.steps, largest[r], out + r * stride);
}

// out [Rows, Isa::COLUMNS] with rows `stride` apart
template <class Isa, size_t Rows, bool IsFirst>
void tile(const Panel& panel, const uint8_t* codes, const float* largest, float* out, size_t stride) {
    constexpr size_t BYTES = Isa::INPUTS / 4 * Isa::LINE;
    typename Isa::Sums sums[(Rows + Isa::ROWS - 1) / Isa::ROWS] = {};
    const int8_t* const first = panel.blocks + panel.column * (Isa::IS_COPIED ? panel.num_blocks * Isa::INPUTS : 4);
    size_t i = 0;
    const auto add_blocks = [&](size_t end, auto add) {
        for (; i < end; ++i) {
            const size_t place = Isa::ADDS_IN_16_BITS ? panel.place[i] : i;
            const uint8_t* row = codes + place * Isa::INPUTS * Rows;
            const int8_t* block = first + place * BYTES;
            const auto weights = Isa::load(block);
            if (IsFirst && (Isa::IS_COPIED || panel.column % 16 == 0)) // sixteen columns share a line
                for (size_t line = 0; line < BYTES; line += Isa::IS_COPIED || Isa::COLUMNS > 16 ? 64 : Isa::LINE)
                    __builtin_prefetch(block + AHEAD * (Isa::IS_COPIED ? 1 : 32 / Isa::COLUMNS) + line);
#pragma GCC unroll 16
            for (size_t r = 0; r < Rows; r += Isa::ROWS) add(sums[r / Isa::ROWS], weights, row + r * Isa::INPUTS);
        }
    };
    if constexpr (Isa::ADDS_IN_16_BITS) add_blocks(panel.num_together, Isa::add_together);
    add_blocks(panel.num_blocks, Isa::add);
#pragma GCC unroll 16
    for (size_t r = 0; r < Rows; ++r)
        Isa::store(sums[r / Isa::ROWS], r % Isa::ROWS, panel.middles, panel.steps, largest[r], out + r * stride);
}

using Tile = void (*)(const Panel&, const uint8_t*, const float*, float*, size_t);

template <class Isa, size_t Rows, bool IsFirst>
constexpr Tile tile_code() {
    if constexpr (Isa::INPUTS == mars::kernels::BLOCK)
        return four_bit_tile<Isa, Rows, IsFirst>;
    else
        return tile<Isa, Rows, IsFirst>;
}

template <class Isa, bool IsFirst, size_t... Less>
void tile_of(size_t rows, const Panel& panel, const uint8_t* codes, const float* largest, float* out, size_t stride,
             std::index_sequence<Less...>) {
    static constexpr Tile tiles[] = {tile_code<Isa, Less + 1, IsFirst>()...};
    tiles[rows - 1](panel, codes, largest, out, stride);
}

template <class Isa>
void multiply_panels(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from, size_t to) {
    const size_t width = weights.row_bytes, tiles = weights.num_tiles(rows), outputs = weights.outputs;
    const size_t num_blocks = weights.num_blocks * (mars::kernels::BLOCK / Isa::INPUTS), of_panel = Isa::LAYOUT.columns;
    const auto sizes = std::make_index_sequence<Isa::MOST_ROWS>();
    float edge[Isa::MOST_ROWS * Isa::COLUMNS];
    for (size_t column = from * of_panel; column < std::min(to * of_panel, outputs); column += Isa::COLUMNS) {
        const size_t columns = outputs - column, index = column / Isa::COLUMNS;
        const Panel panel{weights.panels + column / of_panel * weights.panel_bytes,
                          column % of_panel,
                          weights.place.empty() ? nullptr : weights.place.data() + index * num_blocks,
                          num_blocks,
                          weights.place.empty() ? 0 : weights.num_together[index],
                          weights.middles.data() + column,
                          weights.steps.data() + column};
        for (size_t t = 0; t < tiles; ++t) {
            const size_t row = weights.first_row(t, rows), count = weights.first_row(t + 1, rows) - row;
            float* place = out + row * outputs + column;
            const bool is_whole = columns >= Isa::COLUMNS;
            float* written = is_whole ? place : edge;
            const size_t stride = is_whole ? outputs : Isa::COLUMNS;
            if (t == 0)
                tile_of<Isa, true>(count, panel, codes + row * width, largest + row, written, stride, sizes);
            else
                tile_of<Isa, false>(count, panel, codes + row * width, largest + row, written, stride, sizes);
            if (!is_whole)
                for (size_t r = 0; r < count; ++r) std::memcpy(place + r * outputs, edge + r * stride, columns * sizeof(float));
        }
    }
}

// The set of an Isa, with that of its processors for weights of four bits
template <class Isa, auto Multiply = multiply_panels<Isa>>
constexpr mars::kernels::InstructionSet
set_of(const char* name, bool (*is_here)(), decltype(mars::kernels::InstructionSet::quantize) quantize,
       const mars::kernels::InstructionSet* four_bits = nullptr, decltype(mars::kernels::InstructionSet::prepare) prepare = nullptr) {
    return {name, is_here, Isa::LAYOUT, Isa::IS_COPIED ? Isa::COLUMNS : 0, Isa::MOST_ROWS, quantize, Multiply, prepare, four_bits};
}

inline int32_t four(const void* bytes) {
    int32_t group;
    std::memcpy(&group, bytes, sizeof group);
    return group;
}

} // namespace
