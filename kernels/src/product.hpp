// The product of rows that are quantized on the way and weights of eight or four bits, for one instruction set.
//
// Weights have the form that docs/format.md describes: panels of columns, and in each the inputs by fours, of each column four bytes, because
// instructions for byte products add four. Rows become codes, unsigned around 128 or, on Arm and without VNNI, signed, in tiles of a few rows:
// for each block of inputs the codes of the first row, of the second, and so on. The codes of a tile for weights of four bits are signed, and
// followed by the sums of each group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace mars::kernels {

constexpr size_t BLOCK = 64; // inputs, of which weights have a whole number: those that are missing are zeros

// How weights are stored: the columns of a panel, the bytes of a block of it, and those after the last block.
struct Layout {
    size_t columns, block_bytes, last_bytes;
};

// For each four inputs and column four bytes; at the end the sum of each column, an int32.
inline constexpr Layout BYTES{32, BLOCK * 32, 4 * 32};

// A zero point and a multiplier for each 32 inputs and column: a decoded weight is scale * multiplier * (code - zero point). A block is two
// such groups: of each group the codes of inputs 0 to 3 of every column, with inputs 16 to 19 in the upper halves, then 4 to 7 and so on;
// then the multipliers of both groups of every column, then their zero points.
inline constexpr Layout FOUR_BITS{16, (BLOCK / 2 + 2 * 2) * 16, 0};
constexpr size_t GROUP = 32;

struct Packed;

// Sizes that an instruction set works with, and its code.
struct InstructionSet {
    const char* name;
    bool (*is_here)(); // whether this processor has it
    Layout layout;
    size_t copied_columns; // into which panels of bytes are split, or 0
    size_t most_rows;      // of a tile
    // Codes of a tile of rows [rows, inputs], and the largest number of each row.
    void (*quantize)(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest);
    // Panels `from` to `to` of `rows` rows. out is [rows, outputs].
    void (*multiply)(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from, size_t to);
    void (*prepare)(Packed& weights, size_t from, size_t to); // tables for these panels, or null
    const InstructionSet* four_bits;                          // the same for weights of four bits
};

extern const InstructionSet portable;
#ifdef __x86_64__
extern const InstructionSet avx512_vnni, avx_vnni, avx2;

// What this processor has and its system has enabled; AVX-512 with F, BW and VL.
struct Processor {
    Processor();
    bool avx2 = false, avx_vnni = false, avx512_vnni = false, amx_int8 = false;
};

#ifdef __linux__
extern const InstructionSet amx_int8;
#endif
#elif defined(__aarch64__) && defined(__linux__)
extern const InstructionSet i8mm, dotprod, dotprod_four_bits;
#endif

// The set called `name` if this processor has it, else the fastest that it has.
const InstructionSet& choose(const char* name);

// Of the codes of a row in the two groups of a block. The product with weights from -8 to 7 begins at `starts` if that with weights from 0 to
// 15 is added to it, and fits into 16 bits.
struct GroupSums {
    int32_t starts[2];
    int16_t of[2];
};

struct Packed {
    // Copies [panels, panel_bytes] in the set's layout; one scale for each output.
    Packed(const InstructionSet& set, const int8_t* panels, const float* scales, size_t num_blocks, size_t outputs);

    bool fits(size_t inputs) const { return inputs > 0 && (inputs + BLOCK - 1) / BLOCK == num_blocks; }
    size_t num_panels() const { return (outputs + set.layout.columns - 1) / set.layout.columns; }
    size_t num_tiles(size_t rows) const { return (rows + set.most_rows - 1) / set.most_rows; }
    size_t first_row(size_t tile, size_t rows) const { return rows * tile / num_tiles(rows); }

    const InstructionSet& set;
    const size_t num_blocks, outputs;
    const size_t row_bytes, panel_bytes; // of codes and of weights
    std::vector<int32_t> middles;        // of each column: how much its sums are too large
    std::vector<float> steps;            // of each column: the product's unit for a row whose largest number is 1
    // The panels in large pages, in which a product of one row takes up to 0.6 of the time. For a set with fewer columns than the layout,
    // for which strides are slow, its columns lie one after the other.
    std::shared_ptr<int8_t> memory;
    const int8_t* panels;
    // If the set adds in 16 bits, of each eight columns: eight inputs after the other, and of how many of them, which come first, the sums of
    // two groups of four fit into 16 bits.
    std::vector<uint16_t> place;
    std::vector<size_t> num_together;
};

constexpr size_t FEW_TILES = 4;   // which one thread quantizes
constexpr size_t CODES_AHEAD = 8; // that are read behind the last row if two rows are multiplied at once

// Rows as codes, for every product with weights of the same inputs.
struct Codes {
    const uint8_t* codes;
    const float* largest;
    size_t rows;
};

struct Product {
    const Packed& weights;
    float* out; // [rows, outputs]
};

struct Nothing {
    void operator()(size_t, size_t) const {}
};

// The codes of x [rows, inputs], in memory of this thread that the next call overwrites. `run(count, part)` calls part(0) to
// part(count - 1), on several threads. `prepare(from, to)` writes these rows of x first.
template <class Run, class Prepare = Nothing>
Codes codes_of(const Packed& weights, const float* x, size_t rows, size_t inputs, Run run, Prepare prepare = {}) {
    static thread_local std::vector<uint8_t> code_memory;
    static thread_local std::vector<float> largest_memory;
    const size_t width = weights.row_bytes, tiles = weights.num_tiles(rows);
    code_memory.resize(std::max(code_memory.size(), rows * width + CODES_AHEAD));
    largest_memory.resize(std::max(largest_memory.size(), rows));
    uint8_t* codes = code_memory.data();
    float* largest = largest_memory.data();
    const auto quantize_tile = [&weights, &prepare, x, codes, largest, rows, inputs, width](size_t tile) {
        const size_t from = weights.first_row(tile, rows), to = weights.first_row(tile + 1, rows);
        prepare(from, to);
        weights.set.quantize(x + from * inputs, to - from, inputs, codes + from * width, largest + from);
    };
    if (tiles > FEW_TILES)
        run(tiles, quantize_tile);
    else
        for (size_t tile = 0; tile < tiles; ++tile) quantize_tile(tile);
    return {codes, largest, rows};
}

// Every product of the same codes, on several threads. `finish(from, to)` goes on with these columns of a single product.
template <class Run, class Finish = Nothing>
void multiply(const Codes& codes, std::initializer_list<Product> products, Run run, Finish finish = {}) {
    // A call is worth 16 KiB of weights. More of them are faster with many rows, but leave less to divide among threads.
    const auto panels_at_once = [](const Packed& weights) {
        return std::max(1 + 16384 / weights.panel_bytes, std::min(65536 / weights.panel_bytes, weights.num_panels() / 32));
    };
    const auto num_parts = [&panels_at_once](const Packed& weights) {
        const size_t part = panels_at_once(weights);
        return (weights.num_panels() + part - 1) / part;
    };
    size_t parts = 0;
    for (const Product& product : products) parts += num_parts(product.weights);
    run(parts, [&](size_t index) {
        const Product* product = products.begin();
        for (; index >= num_parts(product->weights); ++product) index -= num_parts(product->weights);
        const Packed& weights = product->weights;
        const size_t part = panels_at_once(weights), from = index * part, to = std::min(from + part, weights.num_panels());
        weights.set.multiply(weights, codes.codes, codes.largest, codes.rows, product->out, from, to);
        finish(from * weights.set.layout.columns, std::min(to * weights.set.layout.columns, weights.outputs));
    });
}

// out [rows, outputs] = x [rows, inputs] times the weights
template <class Run>
void multiply(const Packed& weights, const float* x, size_t rows, size_t inputs, float* out, Run run) {
    multiply(codes_of(weights, x, rows, inputs, run), {{weights, out}}, run);
}

} // namespace mars::kernels
