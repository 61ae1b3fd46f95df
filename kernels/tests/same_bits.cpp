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
    multiply(weights, x.data(), rows, x.size() / rows, out.data(), in_turn);
    return out;
}

// Numbers in a layout, all zeros.
struct Stored {
    const Layout layout;
    const size_t blocks, panels;
    std::vector<int8_t> bytes;

    Stored(const Layout& form, size_t inputs, size_t outputs)
        : layout(form), blocks((inputs + BLOCK - 1) / BLOCK), panels((outputs + form.columns - 1) / form.columns),
          bytes(panels * (blocks * form.block_bytes + form.last_bytes)) {}

    int8_t* panel(size_t column) { return bytes.data() + column / layout.columns * (bytes.size() / panels); }

    // A weight, in bytes
    void put(size_t input, size_t column, int8_t weight) {
        int8_t* const place = panel(column);
        const size_t at = column % layout.columns * 4;
        place[input / 4 * 4 * layout.columns + at + input % 4] = weight;
        int32_t sum;
        std::memcpy(&sum, place + blocks * layout.block_bytes + at, sizeof sum);
        sum += weight;
        std::memcpy(place + blocks * layout.block_bytes + at, &sum, sizeof sum);
    }

    // The code of a weight in four bits, and what its group has
    void put_code(size_t input, size_t column, unsigned code) {
        const size_t at = column % layout.columns, lines = input % BLOCK / GROUP * 4 + input % 16 / 4;
        int8_t& both = panel(column)[input / BLOCK * layout.block_bytes + (lines * layout.columns + at) * 4 + input % 4];
        both = static_cast<int8_t>(both | code << (input / 16 % 2 * 4));
    }
    void put_factors(size_t group, size_t column, unsigned multiplier, unsigned zero_point) {
        const size_t at = column % layout.columns;
        int8_t* const factors = panel(column) + group / 2 * layout.block_bytes + 8 * 4 * layout.columns;
        factors[at * 2 + group % 2] = static_cast<int8_t>(multiplier);
        factors[(layout.columns + at) * 2 + group % 2] = static_cast<int8_t>(zero_point);
    }
};

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
        const auto most = static_cast<unsigned>(std::min<size_t>(255, (size_t{1} << 31) / (127 * 15 * inputs)));
        std::vector<float> scales(outputs);
        for (float& scale : scales) scale = 0.01f + std::fabs(number(draw));
        for (const bool is_extreme : {false, true}) {
            Stored stored(FOUR_BITS, inputs, outputs);
            for (size_t column = 0; column < outputs; ++column) {
                const unsigned extreme = column % 2 ? 15 : 0;
                for (size_t i = 0; i < inputs; ++i) stored.put_code(i, column, is_extreme ? extreme : draw() % 16);
                for (size_t group = 0; group < inputs / GROUP; ++group)
                    stored.put_factors(group, column, is_extreme ? most : 1 + draw() % most, is_extreme ? 15 - extreme : draw() % 16);
            }
            const Packed fast(*set.four_bits, stored.bytes.data(), scales.data(), stored.blocks, outputs),
                slow(*portable.four_bits, stored.bytes.data(), scales.data(), stored.blocks, outputs);
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
                                                        {130, 100}, {576, 65}, {1100, 2000}}; // the last has tables of several threads
    for (const auto& [inputs, outputs] : shapes) {
        Stored stored(BYTES, inputs, outputs);
        for (size_t column = 0; column < outputs; ++column)
            for (size_t i = 0; i < inputs; ++i) stored.put(i, column, static_cast<int8_t>(weight(draw)));
        std::vector<float> scales(outputs);
        for (float& scale : scales) scale = 0.01f + std::fabs(number(draw));
        const Packed fast(set, stored.bytes.data(), scales.data(), stored.blocks, outputs),
            slow(portable, stored.bytes.data(), scales.data(), stored.blocks, outputs);
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
