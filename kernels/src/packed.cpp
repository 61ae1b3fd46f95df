#include <algorithm>
#include <cstring>

#include "memory.hpp"
#include "product.hpp"
#include "quantize.hpp"

namespace mars::kernels {

namespace {

constexpr int MOST_WEIGHT = 32767 / 127; // of the weights whose products with signed codes are added in one number of 16 bits

using Block = std::vector<int8_t>; // [groups, columns, group]

// One of the 1 << `halvings` shares of a block, which add up to it.
Block share(const Block& block, int index, int halvings) {
    Block part(block.size());
    for (size_t i = 0; i < block.size(); ++i) part[i] = static_cast<int8_t>((block[i] + index) >> halvings);
    return part;
}

// Whether the sums of the two groups of each share fit into 16 bits, whatever the codes are. Pairs of weights have one sum.
bool fits(const Block& block, int halvings) {
    const size_t half = block.size() / 2;
    for (size_t pair = 0; pair < half; pair += 2) {
        int total = 0;
        for (const size_t i : {pair, pair + 1, half + pair, half + pair + 1})
            total += (std::abs(block[i]) + (1 << halvings) - 1) >> halvings;
        if (total > MOST_WEIGHT) return false;
    }
    return true;
}

} // namespace

Packed::Packed(const InstructionSet& chosen, const int8_t* weights, const float* scales, size_t num_inputs, size_t num_outputs)
    : set(chosen), inputs(num_inputs), outputs(num_outputs), middles(num_panels() * set.columns), steps(num_panels() * set.columns) {
    std::vector<int8_t> packed;
    packed.reserve(padded_inputs() * middles.size() / 16 * 17);
    Block block(set.inputs * set.columns);
    for (size_t panel = 0; panel < num_panels(); ++panel) {
        first.push_back(static_cast<uint32_t>(packed.size() / block.size()));
        const size_t from = panel * set.columns, columns = std::min(set.columns, outputs - from);
        for (size_t input = 0; input < inputs; input += set.inputs) {
            std::fill(block.begin(), block.end(), int8_t{0});
            for (size_t i = 0; i < std::min(set.inputs, inputs - input); ++i)
                for (size_t column = 0; column < columns; ++column) {
                    const int8_t weight = weights[(input + i) * outputs + from + column];
                    block[(i / set.group * set.columns + column) * set.group + i % set.group] = weight;
                    middles[from + column] += 128 * weight;
                }
            int halvings = 0;
            while (set.adds_in_16_bits && !fits(block, halvings)) ++halvings;
            for (int index = 0; index < 1 << halvings; ++index) {
                const Block part = share(block, index, halvings);
                packed.insert(packed.end(), part.begin(), part.end());
                if (set.adds_in_16_bits) place.push_back(static_cast<uint16_t>(input / set.inputs));
            }
        }
    }
    first.push_back(static_cast<uint32_t>(packed.size() / block.size()));
    blocks = weight_memory(packed.size());
    std::memcpy(blocks.get(), packed.data(), packed.size());
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
