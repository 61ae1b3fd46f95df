// A product in tiles of rows and panels of columns whose sums stay in registers. `Isa` has the instructions, for ROWS rows at a time.
// Included by one file for each instruction set, which is compiled for it; nothing here may be shared among them.
#pragma once

#include <cstring>
#include <utility>

#include "product.hpp"

namespace {

using mars::kernels::Packed;

constexpr size_t AHEAD = 4096; // bytes of weights that are fetched before they are needed

struct Panel {
    const int8_t* blocks;
    const uint16_t* place;
    size_t num_blocks, num_together;
    const int32_t* middles;
    const float* steps;
};

// Of an Isa for weights of four bits
template <size_t Columns, size_t MostRows>
struct FourBitSizes {
    static constexpr size_t COLUMNS = Columns, INPUTS = mars::kernels::FourBits::BLOCK, MOST_ROWS = MostRows;
    static constexpr bool ADDS_IN_16_BITS = false;
};

// `tile` for weights of four bits, whose group is unpacked for all rows
template <class Isa, size_t Rows, bool IsFirst>
void four_bit_tile(const Panel& panel, const uint8_t* codes, const float* largest, float* out, size_t stride) {
    using mars::kernels::FourBits, mars::kernels::GroupSums;
    typename Isa::Sums sums[Rows] = {};
    const auto* of_codes = reinterpret_cast<const GroupSums*>(codes + panel.num_blocks * Isa::INPUTS * Rows);
    const int8_t* block = panel.blocks;
    for (size_t i = 0; i < panel.num_blocks;
         ++i, block += FourBits::bytes(Isa::COLUMNS), codes += FourBits::BLOCK * Rows, of_codes += Rows) {
        if (IsFirst)
            for (size_t line = 0; line < FourBits::bytes(Isa::COLUMNS); line += 64) __builtin_prefetch(block + AHEAD + line);
        const typename Isa::Factors factors(block + Isa::INPUTS / 2 * Isa::COLUMNS);
#pragma GCC unroll 2
        for (size_t group = 0; group < 2; ++group) {
            const typename Isa::Weights weights(block + group * FourBits::GROUP / 2 * Isa::COLUMNS);
#pragma GCC unroll 16
            for (size_t r = 0; r < Rows; ++r)
                Isa::add(sums[r], weights, factors.of[group], codes + r * FourBits::BLOCK + group * FourBits::GROUP,
                         of_codes[r].starts[group]);
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
    typename Isa::Sums sums[(Rows + Isa::ROWS - 1) / Isa::ROWS] = {};
    const int8_t* block = panel.blocks;
    size_t i = 0;
    const auto add_blocks = [&](size_t end, auto add) {
        for (; i < end; ++i, block += Isa::INPUTS * Isa::COLUMNS) {
            const uint8_t* row = codes + (Isa::ADDS_IN_16_BITS ? panel.place[i] : i) * Isa::INPUTS * Rows;
            const auto weights = Isa::load(block);
            if (IsFirst)
                for (size_t line = 0; line < Isa::INPUTS * Isa::COLUMNS; line += 64) __builtin_prefetch(block + AHEAD + line);
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
    if constexpr (Isa::INPUTS == mars::kernels::FourBits::BLOCK)
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
    const size_t width = weights.row_bytes, tiles = weights.num_tiles(rows), num_blocks = weights.padded_inputs() / Isa::INPUTS;
    const auto sizes = std::make_index_sequence<Isa::MOST_ROWS>();
    float edge[Isa::MOST_ROWS * Isa::COLUMNS];
    for (size_t p = from; p < to; ++p) {
        const size_t column = p * Isa::COLUMNS, columns = weights.outputs - column;
        const Panel panel{weights.blocks.get() + p * weights.panel_bytes,
                          weights.place.empty() ? nullptr : weights.place.data() + p * num_blocks,
                          num_blocks,
                          weights.num_together.empty() ? 0 : weights.num_together[p],
                          weights.middles.data() + column,
                          weights.steps.data() + column};
        for (size_t t = 0; t < tiles; ++t) {
            const size_t row = weights.first_row(t, rows), count = weights.first_row(t + 1, rows) - row;
            float* place = out + row * weights.outputs + column;
            const bool is_whole = columns >= Isa::COLUMNS;
            float* written = is_whole ? place : edge;
            const size_t stride = is_whole ? weights.outputs : Isa::COLUMNS;
            if (t == 0)
                tile_of<Isa, true>(count, panel, codes + row * width, largest + row, written, stride, sizes);
            else
                tile_of<Isa, false>(count, panel, codes + row * width, largest + row, written, stride, sizes);
            if (!is_whole)
                for (size_t r = 0; r < count; ++r) std::memcpy(place + r * weights.outputs, edge + r * stride, columns * sizeof(float));
        }
    }
}

// The set of an Isa, with that of its processors for weights of four bits
template <class Isa, auto Multiply = multiply_panels<Isa>>
constexpr mars::kernels::InstructionSet set_of(const char* name, bool (*is_here)(),
                                               decltype(mars::kernels::InstructionSet::quantize) quantize, size_t group,
                                               const mars::kernels::InstructionSet* four_bits = nullptr) {
    return {name, is_here, Isa::COLUMNS, Isa::INPUTS, group, Isa::MOST_ROWS, Isa::ADDS_IN_16_BITS, quantize, Multiply, four_bits};
}

inline int32_t four(const void* bytes) {
    int32_t group;
    std::memcpy(&group, bytes, sizeof group);
    return group;
}

} // namespace
