#include "quantize.hpp"
#include "tile.hpp"

namespace {

using mars::kernels::GROUP;

struct Portable : ByteSizes<8, 4, 4> {
    struct Sums {
        int32_t of[COLUMNS];
    };
    using Weights = const int8_t*;

    static Weights load(const int8_t* block) { return block; }

    static void add(Sums& sums, Weights weights, const uint8_t* codes) {
        for (size_t column = 0; column < COLUMNS; ++column)
            for (size_t i = 0; i < INPUTS; ++i) sums.of[column] += codes[i] * weights[column * INPUTS + i];
    }

    static void store(const Sums& sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        for (size_t column = 0; column < COLUMNS; ++column)
            out[column] = static_cast<float>(sums.of[column] - middles[column]) * steps[column] * largest;
    }
};

struct PortableFourBits : FourBitSizes<8, 4> {
    struct Sums {
        uint32_t of[COLUMNS]; // which may wrap around before the last group
    };
    struct Factors {
        const int8_t *of[2], *zero_points;
        explicit Factors(const int8_t* bytes) : of{bytes, bytes + 1}, zero_points(bytes + LINE / 2) {}
    };
    struct Weights {
        const int8_t* block;
        explicit Weights(const int8_t* bytes) : block(bytes) {}
        int of(size_t input, size_t column) const { return block[input % 16 / 4 * LINE + column * 4 + input % 4] >> input / 16 * 4 & 15; }
    };

    static void add(Sums& sums, const Weights& weights, const int8_t* factors, const uint8_t* codes, int32_t start) {
        for (size_t column = 0; column < COLUMNS; ++column) {
            int32_t product = start;
            for (size_t i = 0; i < GROUP; ++i) product += static_cast<int8_t>(codes[i]) * weights.of(i, column);
            sums.of[column] += static_cast<uint32_t>(product * static_cast<uint8_t>(factors[2 * column]));
        }
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        for (size_t i = 0; i < 2 * COLUMNS; ++i)
            sums.of[i / 2] += static_cast<uint32_t>(static_cast<uint8_t>(factors.of[0][i]) * (8 - factors.zero_points[i]) * both[i % 2]);
    }

    static void store(const Sums& sums, size_t, const int32_t*, const float* steps, float largest, float* out) {
        for (size_t column = 0; column < COLUMNS; ++column)
            out[column] = static_cast<float>(static_cast<int32_t>(sums.of[column])) * steps[column] * largest;
    }
};

bool is_here() { return true; }

template <size_t Block, bool IsSigned>
void quantize(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    for (size_t row = 0; row < rows; ++row, x += inputs) {
        largest[row] = largest_of(x, inputs, 0, nullptr, 0);
        for (size_t i = 0; i < inputs; ++i) codes[code_place<Block>(i, row, rows)] = code_of(x[i], largest[row]) ^ (IsSigned ? 0x80 : 0);
    }
}

} // namespace

namespace mars::kernels {
static const InstructionSet four_bits = set_of<PortableFourBits>("portable", is_here, quantize_groups<quantize<BLOCK, true>>);
const InstructionSet portable = set_of<Portable>("portable", is_here, quantize<Portable::INPUTS, false>, &four_bits);
} // namespace mars::kernels
