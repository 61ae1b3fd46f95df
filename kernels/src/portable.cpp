#include "quantize.hpp"
#include "tile.hpp"

namespace {

using mars::kernels::FourBits;

struct Portable {
    static constexpr size_t COLUMNS = 8, INPUTS = 4, ROWS = 1, MOST_ROWS = 4;
    static constexpr bool ADDS_IN_16_BITS = false;
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
        int of[2][COLUMNS], zeros[2][COLUMNS];

        explicit Factors(const int8_t* bytes) {
            for (size_t i = 0; i < 2 * COLUMNS; ++i) {
                of[i % 2][i / 2] = static_cast<uint8_t>(bytes[i]);
                zeros[i % 2][i / 2] = of[i % 2][i / 2] * bytes[2 * COLUMNS + i];
            }
        }
    };
    struct Weights {
        int of[8][COLUMNS * 4];

        explicit Weights(const int8_t* block) {
            for (size_t i = 0; i < 4; ++i)
                for (size_t k = 0; k < COLUMNS * 4; ++k, ++block) of[i][k] = *block & 15, of[i + 4][k] = *block >> 4 & 15;
        }
    };

    static void add(Sums& sums, const Weights& weights, const int* factors, const uint8_t* codes, int32_t start) {
        for (size_t column = 0; column < COLUMNS; ++column) {
            int32_t product = start;
            for (size_t i = 0; i < FourBits::GROUP; ++i) product += static_cast<int8_t>(codes[i]) * weights.of[i / 4][column * 4 + i % 4];
            sums.of[column] += static_cast<uint32_t>(product * factors[column]);
        }
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        for (size_t column = 0; column < COLUMNS; ++column)
            sums.of[column] += static_cast<uint32_t>(factors.zeros[0][column] * both[0] + factors.zeros[1][column] * both[1]);
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
static const InstructionSet four_bits =
    set_of<PortableFourBits>("portable", is_here, quantize_groups<quantize<FourBits::BLOCK, true>>, FourBits::GROUP);
const InstructionSet portable = set_of<Portable>("portable", is_here, quantize<Portable::INPUTS, false>, 4, &four_bits);
} // namespace mars::kernels
