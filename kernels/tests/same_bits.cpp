// Whether the products of an instruction set of this processor have the bits of the portable code.
//   same_bits NAME    exit code 0: yes; 1: no; 2: this processor lacks it
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "../src/product.hpp"

using namespace mars::kernels;

namespace {

std::vector<float> product(const Packed& weights, const std::vector<float>& x, size_t rows) {
    std::vector<float> out(rows * weights.outputs, NAN);
    multiply(weights, x.data(), rows, out.data(), [](size_t count, auto part) {
        for (size_t index = 0; index < count; ++index) part(index);
    });
    return out;
}

} // namespace

int main(int, char** arguments) {
    const InstructionSet& set = choose(arguments[1]);
    if (std::strcmp(set.name, arguments[1]) != 0) return 2;
    std::mt19937 draw(0);
    std::uniform_int_distribution<int> weight(-127, 127);
    std::normal_distribution<float> number;
    const std::vector<std::pair<size_t, size_t>> shapes{{1, 1}, {3, 5}, {8, 8}, {17, 33}, {64, 48}, {130, 100}, {576, 65}};
    for (const auto& [inputs, outputs] : shapes) {
        std::vector<int8_t> weights(inputs * outputs);
        for (int8_t& w : weights) w = static_cast<int8_t>(weight(draw));
        std::vector<float> scales(outputs);
        for (float& scale : scales) scale = 0.01f + std::fabs(number(draw));
        const Packed fast(set, weights.data(), scales.data(), inputs, outputs),
            slow(portable, weights.data(), scales.data(), inputs, outputs);
        for (size_t rows = 1; rows <= 40; ++rows) {
            std::vector<float> x(rows * inputs);
            for (float& value : x) value = number(draw);
            for (size_t i = 0; i < inputs; ++i) x[rows / 2 * inputs + i] *= rows % 2 ? 0 : 1e-37f;
            if (rows % 5 == 0) x[inputs - 1] = INFINITY;
            const std::vector<float> a = product(fast, x, rows), b = product(slow, x, rows);
            if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) {
                std::printf("%s: %zu rows of [%zu, %zu] differ from portable\n", set.name, rows, inputs, outputs);
                return 1;
            }
        }
    }
    return 0;
}
