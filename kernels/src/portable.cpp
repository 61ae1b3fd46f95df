#include "quantize.hpp"
#include "tile.hpp"

namespace {

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

bool is_here() { return true; }

void quantize(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    for (size_t row = 0; row < rows; ++row, x += inputs) {
        largest[row] = largest_of(x, inputs, 0, nullptr, 0);
        for (size_t i = 0; i < inputs; ++i) codes[code_place<Portable::INPUTS>(i, row, rows)] = code_of(x[i], largest[row]);
    }
}

} // namespace

namespace mars::kernels {
const InstructionSet portable{"portable",          is_here, Portable::COLUMNS, Portable::INPUTS,         4,
                              Portable::MOST_ROWS, false,   quantize,          multiply_panels<Portable>};
}
