// Whether products and attention with an instruction set of this processor have the bits of the portable code, and attention those of
// other processors.
//   same_bits NAME    exit code 0: yes; 1: no; 2: this processor lacks it
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "../src/attention.hpp"
#include "../src/product.hpp"

using namespace mars::kernels;

namespace {

constexpr auto in_turn = [](size_t count, auto part) {
    for (size_t index = 0; index < count; ++index) part(index);
};

std::vector<float> product(const Packed& weights, const std::vector<float>& x, size_t rows) {
    std::vector<float> out(rows * weights.outputs, NAN);
    multiply(weights, x.data(), rows, out.data(), in_turn);
    return out;
}

// The output and the entries of a few steps, whose numbers every processor draws.
std::vector<uint8_t> attended(const AttentionCode& code, size_t heads, size_t kv_heads, size_t head_dim, int64_t window) {
    std::mt19937 draw(1);
    const auto number = [&draw] { return static_cast<float>(static_cast<int32_t>(draw())) * 0x1p-30f; };
    const size_t capacity = 1400, bytes = kv_heads * capacity * (head_dim + SCALE_BYTES);
    std::vector<int8_t> keys(bytes), values(bytes);
    std::vector<uint8_t> all;
    int64_t start = 0;
    for (const size_t slots : {1300, 1, 3, 30}) {
        std::vector<float> q(heads * slots * head_dim), k(kv_heads * slots * head_dim), v(k.size()), out(q.size());
        for (std::vector<float>* numbers : {&q, &k, &v})
            for (float& x : *numbers) x = number();
        const float scale = 0.125f;
        attend(code,
               {q.data(), k.data(), v.data(), keys.data(), values.data(), &start, scale, window, out.data(), 1, heads, kv_heads, slots,
                capacity, head_dim},
               in_turn);
        start += static_cast<int64_t>(slots);
        const auto* begin = reinterpret_cast<const uint8_t*>(out.data());
        all.insert(all.end(), begin, begin + out.size() * sizeof(float));
    }
    all.insert(all.end(), keys.begin(), keys.end());
    all.insert(all.end(), values.begin(), values.end());
    return all;
}

bool is_attention_right(const char* name) {
    uint32_t hash = 2166136261; // FNV-1a
    for (const auto& [heads, kv_heads, head_dim, window] :
         std::vector<std::array<size_t, 4>>{{9, 3, 64, 4096}, {4, 4, 36, 50}, {4, 1, 80, 4096}, {2, 1, 8, 5}}) {
        const auto slow = attended(attention_portable, heads, kv_heads, head_dim, static_cast<int64_t>(window));
        if (attended(attention_code(name), heads, kv_heads, head_dim, static_cast<int64_t>(window)) != slow) return false;
        for (const uint8_t byte : slow) hash = (hash ^ byte) * 16777619;
    }
    return hash == 2747143674;
}

// Whether products with weights of four bits have the bits of the portable code: random ones, and the largest in both directions.
bool are_four_bits_right(const InstructionSet& set) {
    std::mt19937 draw(0);
    std::normal_distribution<float> number;
    for (const auto& [inputs, outputs] : std::vector<std::pair<size_t, size_t>>{
             {32, 1}, {32, 5}, {64, 8}, {96, 33}, {576, 65}, {1536, 100}, {8960, 19}, {4896, 16}, {1120, 2000}}) {
        const size_t groups = inputs / FourBits::GROUP;
        const auto most = static_cast<unsigned>(std::min<size_t>(255, (size_t{1} << 31) / (127 * 15 * inputs)));
        std::vector<uint8_t> weights((inputs * outputs + 1) / 2), zero_points((groups * outputs + 1) / 2), multipliers(groups * outputs);
        const auto fill = [&draw](std::vector<uint8_t>& tensor, size_t columns, bool is_extreme, bool odd_is_largest) {
            for (size_t i = 0; i < 2 * tensor.size(); ++i) {
                const unsigned extreme = (i % columns % 2 == 1) == odd_is_largest ? 15 : 0, number = is_extreme ? extreme : draw() % 16;
                tensor[i / 2] = static_cast<uint8_t>(i % 2 ? tensor[i / 2] | number << 4 : number);
            }
        };
        std::vector<float> scales(outputs);
        for (float& scale : scales) scale = 0.01f + std::fabs(number(draw));
        for (const bool is_extreme : {false, true}) {
            fill(weights, outputs, is_extreme, true);
            fill(zero_points, outputs, is_extreme, false);
            for (uint8_t& multiplier : multipliers) multiplier = static_cast<uint8_t>(is_extreme ? most : 1 + draw() % most);
            const FourBits tensors{weights.data(), zero_points.data(), multipliers.data()};
            const Packed fast(set, tensors, scales.data(), inputs, outputs), slow(portable, tensors, scales.data(), inputs, outputs);
            for (size_t rows = 1; rows <= (outputs == 2000 || is_extreme ? 3 : 40); ++rows) {
                std::vector<float> x(rows * inputs);
                for (float& value : x) value = is_extreme ? (rows % 2 ? 1.0f : -1.0f) : number(draw);
                for (size_t i = 0; i < inputs; ++i) x[rows / 2 * inputs + i] *= rows == 1 ? 1 : rows % 2 ? 0 : 1e-37f;
                if (rows % 5 == 0) x[inputs - 1] = INFINITY;
                const std::vector<float> a = product(fast, x, rows), b = product(slow, x, rows);
                if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) continue;
                std::printf("%s: %zu rows of [%zu, %zu] in four bits differ from portable\n", set.name, rows, inputs, outputs);
                return false;
            }
        }
    }
    return true;
}

} // namespace

int main(int, char** arguments) {
    const InstructionSet& set = choose(arguments[1]);
    if (std::strcmp(set.name, arguments[1]) != 0) return 2;
    std::mt19937 draw(0);
    std::uniform_int_distribution<int> weight(-127, 127);
    std::normal_distribution<float> number;
    const std::vector<std::pair<size_t, size_t>> shapes{{1, 1},     {3, 5},    {8, 8},      {17, 33}, {64, 48},
                                                        {130, 100}, {576, 65}, {1100, 2000}}; // the last is packed by several threads
    for (const auto& [inputs, outputs] : shapes) {
        std::vector<int8_t> weights(inputs * outputs);
        for (int8_t& w : weights) w = static_cast<int8_t>(weight(draw));
        std::vector<float> scales(outputs);
        for (float& scale : scales) scale = 0.01f + std::fabs(number(draw));
        const Packed fast(set, weights.data(), outputs, scales.data(), inputs, outputs),
            slow(portable, weights.data(), outputs, scales.data(), inputs, outputs);
        for (size_t rows = 1; rows <= (outputs == 2000 ? 2 : 40); ++rows) {
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
    if (!are_four_bits_right(set)) return 1;
    if (!is_attention_right(set.name)) {
        std::printf("%s: attention differs\n", set.name);
        return 1;
    }
    return 0;
}
