#include <algorithm>
#include <cstring>

#include "memory.hpp"
#include "product.hpp"
#include "quantize.hpp"

namespace mars::kernels {

namespace {

constexpr int MOST_WEIGHT = 32768 / 128; // of the weights whose products with codes are added in one number of 16 bits

// Whether the sums of the two groups [columns, group] of a block fit into 16 bits, whatever the codes are. Pairs of weights have one sum.
bool fits(const std::vector<int8_t>& block) {
    const size_t half = block.size() / 2;
    for (size_t pair = 0; pair < half; pair += 2) {
        int total = 0;
        for (const size_t i : {pair, pair + 1, half + pair, half + pair + 1}) total += std::abs(block[i]);
        if (total > MOST_WEIGHT) return false;
    }
    return true;
}

} // namespace

Packed::Packed(const InstructionSet& chosen, const int8_t* weights, const float* scales, size_t num_inputs, size_t num_outputs)
    : set(chosen), inputs(num_inputs), outputs(num_outputs), middles(num_panels() * set.columns), steps(num_panels() * set.columns) {
    std::vector<int8_t> block(set.inputs * set.columns); // [groups, columns, group]
    const size_t num_blocks = padded_inputs() / set.inputs;
    blocks = weight_memory(num_panels() * num_blocks * block.size());
    place.resize(set.adds_in_16_bits ? num_panels() * num_blocks : 0);
    for (size_t panel = 0; panel < num_panels(); ++panel) {
        const size_t from = panel * set.columns, columns = std::min(set.columns, outputs - from);
        size_t front = 0, back = num_blocks;
        for (size_t number = 0; number < num_blocks; ++number) {
            const size_t input = number * set.inputs;
            std::fill(block.begin(), block.end(), int8_t{0});
            for (size_t i = 0; i < std::min(set.inputs, inputs - input); ++i)
                for (size_t column = 0; column < columns; ++column) {
                    const int8_t weight = weights[(input + i) * outputs + from + column];
                    block[(i / set.group * set.columns + column) * set.group + i % set.group] = weight;
                    middles[from + column] += set.adds_in_16_bits ? std::min<int8_t>(weight, 0) : 128 * weight;
                }
            const size_t index = panel * num_blocks + (!set.adds_in_16_bits || fits(block) ? front++ : --back);
            std::copy(block.begin(), block.end(), blocks.get() + index * block.size());
            if (set.adds_in_16_bits) place[index] = static_cast<uint16_t>(number);
        }
        if (set.adds_in_16_bits) num_together.push_back(front);
    }
    for (size_t column = 0; column < outputs; ++column) steps[column] = CODE_STEP * scales[column];
}

const InstructionSet& choose(const char* name) {
    static const InstructionSet* const sets[] = {
#if defined(__x86_64__) && defined(__linux__)
        &amx_int8,
#endif
#ifdef __x86_64__
        &avx512_vnni, &avx_vnni, &avx2,
#elif defined(__aarch64__) && defined(__linux__)
        &i8mm, &dotprod,
#endif
        &portable};
    const InstructionSet* best = nullptr;
    for (const InstructionSet* set : sets) {
        if (!set->is_here()) continue;
        if (name && std::strcmp(set->name, name) == 0) return *set;
        if (!best) best = set;
    }
    return *best;
}

} // namespace mars::kernels
