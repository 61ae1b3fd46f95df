// The product of rows that are quantized on the way and int8 weights, for one instruction set.
//
// Weights are packed in panels of `columns` columns. A panel is a list of blocks of `inputs` inputs; a block has groups of `group` inputs,
// of each column one group, because instructions for byte products add four or eight. Columns and inputs that are missing are zeros. Rows
// become codes, unsigned around 128 or, on Arm and without VNNI, signed, in tiles of a few rows: for each block the codes of the first row, of the second,
// and so on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mars::kernels {

struct Packed;

// Sizes that an instruction set works with, and its code.
struct InstructionSet {
    const char* name;
    bool (*is_here)();                        // whether this processor has it
    size_t columns, inputs, group, most_rows; // of a panel, of a block, of a group in it, of a tile
    bool adds_in_16_bits;                     // the products of the two groups of a block
    // Codes of a tile of rows [rows, inputs], and the largest number of each row.
    void (*quantize)(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest);
    // Panels `from` to `to` of `rows` rows. out is [rows, outputs].
    void (*multiply)(const Packed& weights, const uint8_t* codes, const float* largest, size_t rows, float* out, size_t from, size_t to);
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
extern const InstructionSet i8mm, dotprod;
#endif

// The set called `name` if this processor has it, else the fastest that it has.
const InstructionSet& choose(const char* name);

struct Packed {
    // weights [inputs, outputs], one scale for each output
    Packed(const InstructionSet& set, const int8_t* weights, const float* scales, size_t inputs, size_t outputs);

    size_t num_panels() const { return (outputs + set.columns - 1) / set.columns; }
    size_t padded_inputs() const { return (inputs + set.inputs - 1) / set.inputs * set.inputs; }
    size_t num_tiles(size_t rows) const { return (rows + set.most_rows - 1) / set.most_rows; }
    size_t first_row(size_t tile, size_t rows) const { return rows * tile / num_tiles(rows); }

    const InstructionSet& set;
    const size_t inputs, outputs;
    std::shared_ptr<int8_t> blocks;
    std::vector<uint32_t> first;  // block of each panel; the last is the number of blocks
    std::vector<uint16_t> place;  // of each block in a row, if the set adds in 16 bits
    std::vector<int32_t> middles; // of each column: its product with codes that are all 128
    std::vector<float> steps;     // of each column: the product's unit for a row whose largest number is 1
};

constexpr size_t FEW_TILES = 4;   // which one thread quantizes
constexpr size_t CODES_AHEAD = 8; // that are read behind the last row if two rows are multiplied at once

// out [rows, outputs] = x [rows, inputs] times the weights. `run(count, part)` calls part(0) to part(count - 1), on several threads.
template <class Run>
void multiply(const Packed& weights, const float* x, size_t rows, float* out, Run run) {
    static thread_local std::vector<uint8_t> code_memory;
    static thread_local std::vector<float> largest_memory;
    const InstructionSet& set = weights.set;
    const size_t width = weights.padded_inputs(), panels = weights.num_panels();
    code_memory.resize(rows * width + CODES_AHEAD);
    largest_memory.resize(rows);
    uint8_t* codes = code_memory.data();
    float* largest = largest_memory.data();
    const size_t tiles = weights.num_tiles(rows);
    const auto quantize = [&weights, x, codes, largest, rows, width](size_t tile) {
        const size_t from = weights.first_row(tile, rows), to = weights.first_row(tile + 1, rows);
        weights.set.quantize(x + from * weights.inputs, to - from, weights.inputs, codes + from * width, largest + from);
    };
    if (tiles > FEW_TILES)
        run(tiles, quantize);
    else
        for (size_t tile = 0; tile < tiles; ++tile) quantize(tile);
    // A call is worth 16 KiB of weights. More of them are faster with many rows, but leave less to divide among threads.
    const size_t panel_bytes = width * set.columns, most = 65536 / panel_bytes;
    const size_t part = std::max(1 + 16384 / panel_bytes, std::min(most, panels / 32));
    run((panels + part - 1) / part, [&weights, codes, largest, rows, out, part, panels](size_t index) {
        const size_t to = (index + 1) * part;
        weights.set.multiply(weights, codes, largest, rows, out, index * part, to < panels ? to : panels);
    });
}

} // namespace mars::kernels
