#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "memory.hpp"
#include "product.hpp"
#include "quantize.hpp"

namespace mars::kernels {

namespace {

constexpr int MOST_WEIGHT = 32768 / 128; // of the weights whose products with codes are added in one number of 16 bits
constexpr size_t STRIP = 64;             // inputs of a panel that are packed before those of the next: both read the same cache lines
constexpr size_t AHEAD = 256;            // bytes of a row that are fetched before they are needed
constexpr size_t THREAD_BYTES = 1 << 20; // of weights, for which a thread is worth its start

// Whether the sums of the two groups of a block fit into 16 bits, whatever the codes are. Pairs of weights have one sum.
template <size_t Columns>
bool fits(const int8_t* const* rows) {
    int16_t most = 0;
    for (size_t pair = 0; pair < 4; pair += 2)
        for (size_t column = 0; column < Columns; ++column) {
            int16_t total = 0;
            for (const size_t row : {pair, pair + 1, pair + 4, pair + 5}) {
                const int16_t weight = rows[row][column];
                total = static_cast<int16_t>(total + std::max(weight, static_cast<int16_t>(-weight)));
            }
            most = std::max(most, total);
        }
    return most <= MOST_WEIGHT;
}

// A group of each column, from rows [Group, Columns]; adds to each column's sum, of all weights or of negative ones. Not inlined, because
// GCC only then trusts `__restrict` and computes with vectors.
template <size_t Columns, size_t Group, bool OnlyNegative>
__attribute__((noinline)) void pack_group(const int8_t* const* rows, int8_t* __restrict group, int32_t* __restrict sums) {
    for (size_t column = 0; column < Columns; ++column)
        for (size_t i = 0; i < Group; ++i) group[column * Group + i] = rows[i][column];
    for (size_t column = 0; column < Columns; ++column) {
        int16_t sum = 0;
        for (size_t i = 0; i < Group; ++i) {
            const int16_t weight = rows[i][column];
            sum = static_cast<int16_t>(sum + (OnlyNegative ? std::min<int16_t>(weight, 0) : weight));
        }
        sums[column] += sum;
    }
}

// Panels `from` to `to`, with constants for compilers to work with.
template <size_t Columns, size_t Group, bool AddsIn16Bits>
void pack(Packed& packed, const int8_t* weights, size_t stride, size_t from, size_t to) {
    constexpr size_t MOST_INPUTS = 64;
    const size_t inputs = packed.set.inputs, num_blocks = packed.padded_inputs() / inputs, strip = STRIP / inputs;
    std::vector<size_t> backs(AddsIn16Bits ? to : 0, num_blocks);
    for (size_t first = 0; first < num_blocks; first += strip)
        for (size_t panel = from; panel < to; ++panel) {
            const size_t column = panel * Columns, columns = std::min(Columns, packed.outputs - column);
            for (size_t number = first; number < std::min(first + strip, num_blocks); ++number) {
                int8_t edge[MOST_INPUTS][Columns];
                const int8_t* rows[MOST_INPUTS];
                for (size_t i = 0, input = number * inputs; i < inputs; ++i, ++input) {
                    rows[i] = weights + input * stride + column;
                    __builtin_prefetch(rows[i] + AHEAD);
                    if (input < packed.inputs && columns == Columns) continue;
                    std::fill_n(edge[i], Columns, int8_t{0});
                    if (input < packed.inputs) std::copy_n(rows[i], columns, edge[i]);
                    rows[i] = edge[i];
                }
                size_t index = panel * num_blocks + number;
                if constexpr (AddsIn16Bits) {
                    index = panel * num_blocks + (fits<Columns>(rows) ? packed.num_together[panel]++ : --backs[panel]);
                    packed.place[index] = static_cast<uint16_t>(number);
                }
                int8_t* block = packed.blocks.get() + index * inputs * Columns;
                for (size_t i = 0; i < inputs; i += Group)
                    pack_group<Columns, Group, AddsIn16Bits>(rows + i, block + i * Columns, packed.middles.data() + column);
            }
        }
}

using Pack = void (*)(Packed& packed, const int8_t* weights, size_t stride, size_t from, size_t to);

Pack pack_of(const InstructionSet& set) {
    if (set.adds_in_16_bits) return pack<8, 4, true>;
    if (set.columns == 8) return set.group == 8 ? pack<8, 8, false> : pack<8, 4, false>;
    return set.columns == 16 ? pack<16, 4, false> : pack<32, 4, false>;
}

} // namespace

Packed::Packed(const InstructionSet& chosen, const int8_t* weights, size_t stride, const float* scales, size_t num_inputs,
               size_t num_outputs)
    : set(chosen), inputs(num_inputs), outputs(num_outputs), middles(num_panels() * set.columns), steps(num_panels() * set.columns) {
    blocks = weight_memory(num_panels() * padded_inputs() * set.columns);
    if (set.adds_in_16_bits) {
        place.resize(num_panels() * (padded_inputs() / set.inputs));
        num_together.resize(num_panels());
    }
    const size_t most = std::min<size_t>(std::thread::hardware_concurrency(), inputs * outputs / THREAD_BYTES);
    const size_t parts = std::clamp<size_t>(most, 1, num_panels());
    std::vector<std::future<void>> others;
    for (size_t part = 1; part < parts; ++part)
        others.push_back(std::async(std::launch::async, pack_of(set), std::ref(*this), weights, stride, num_panels() * part / parts,
                                    num_panels() * (part + 1) / parts));
    pack_of(set)(*this, weights, stride, 0, num_panels() / parts);
    for (std::future<void>& other : others) other.get();
    for (size_t column = 0; column < outputs; ++column) steps[column] = CODE_STEP * scales[column];
    if (!set.adds_in_16_bits)
        for (int32_t& middle : middles) middle *= 128;
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
