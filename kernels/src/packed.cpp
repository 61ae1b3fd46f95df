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

// Numbers of four bits, of `columns` columns from an element of a tensor on; those of missing columns are 0.
template <size_t Columns>
void read_four_bits(const uint8_t* tensor, size_t element, size_t columns, uint8_t* numbers) {
    if (element % 2 == 0 && columns == Columns) {
        for (size_t i = 0; i < Columns; i += 2) {
            const uint8_t both = tensor[(element + i) / 2];
            numbers[i] = both & 15, numbers[i + 1] = both >> 4;
        }
        return;
    }
    for (size_t i = 0; i < Columns; ++i, ++element) numbers[i] = i < columns ? tensor[element / 2] >> element % 2 * 4 & 15 : 0;
}

template <size_t Columns>
void pack_four_bits(Packed& packed, const FourBits& weights, size_t from, size_t to) {
    constexpr size_t GROUP = FourBits::GROUP, GROUP_BYTES = GROUP / 2 * Columns;
    const size_t num_blocks = packed.padded_inputs() / FourBits::BLOCK, num_groups = packed.inputs / GROUP;
    for (size_t number = 0; number < num_blocks; ++number)
        for (size_t panel = from; panel < to; ++panel) {
            const size_t column = panel * Columns, columns = std::min(Columns, packed.outputs - column);
            auto* const block =
                reinterpret_cast<uint8_t*>(packed.blocks.get()) + panel * packed.panel_bytes + number * FourBits::bytes(Columns);
            uint8_t *const factors = block + 2 * GROUP_BYTES, *const zeros = factors + 2 * Columns;
            std::fill_n(block, FourBits::bytes(Columns), uint8_t{0});
            for (size_t half = 0; half < 2 && number * 2 + half < num_groups; ++half) {
                const size_t group = number * 2 + half, place = group * packed.outputs + column;
                uint8_t codes[GROUP][Columns], zero_points[Columns];
                for (size_t i = 0; i < GROUP; ++i)
                    read_four_bits<Columns>(weights.codes, (group * GROUP + i) * packed.outputs + column, columns, codes[i]);
                for (size_t i = 0; i < GROUP / 2; ++i)
                    for (size_t c = 0; c < Columns; ++c)
                        block[half * GROUP_BYTES + (i / 4 * Columns + c) * 4 + i % 4] =
                            static_cast<uint8_t>(codes[i][c] | codes[i + GROUP / 2][c] << 4);
                read_four_bits<Columns>(weights.zero_points, place, columns, zero_points);
                for (size_t c = 0; c < columns; ++c) {
                    factors[2 * c + half] = weights.multipliers[place + c];
                    zeros[2 * c + half] = static_cast<uint8_t>(8 - zero_points[c]);
                }
            }
        }
}

} // namespace

Packed::Packed(const InstructionSet& chosen, const int8_t* weights, size_t stride, const float* scales, size_t num_inputs,
               size_t num_outputs)
    : set(chosen), inputs(num_inputs), outputs(num_outputs), row_bytes(padded_inputs()), panel_bytes(padded_inputs() * set.columns),
      middles(num_panels() * set.columns), steps(num_panels() * set.columns) {
    blocks = weight_memory(num_panels() * panel_bytes);
    if (set.adds_in_16_bits) {
        place.resize(num_panels() * (padded_inputs() / set.inputs));
        num_together.resize(num_panels());
    }
    on_all_cores([this, weights, stride](size_t from, size_t to) { pack_of(set)(*this, weights, stride, from, to); });
    for (size_t column = 0; column < outputs; ++column) steps[column] = CODE_STEP * scales[column];
    if (!set.adds_in_16_bits)
        for (int32_t& middle : middles) middle *= 128;
}

Packed::Packed(const InstructionSet& chosen, const FourBits& weights, const float* scales, size_t num_inputs, size_t num_outputs)
    : set(*chosen.four_bits), inputs(num_inputs), outputs(num_outputs),
      row_bytes(padded_inputs() / FourBits::BLOCK * (FourBits::BLOCK + sizeof(GroupSums))),
      panel_bytes(padded_inputs() / FourBits::BLOCK * FourBits::bytes(set.columns)), middles(num_panels() * set.columns),
      steps(num_panels() * set.columns) {
    blocks = weight_memory(num_panels() * panel_bytes);
    on_all_cores([this, &weights](size_t from, size_t to) {
        (set.columns == 8 ? pack_four_bits<8> : pack_four_bits<16>)(*this, weights, from, to);
    });
    for (size_t column = 0; column < outputs; ++column) steps[column] = CODE_STEP * scales[column];
}

template <class Part>
void Packed::on_all_cores(Part part) const {
    const size_t most = std::min<size_t>(std::thread::hardware_concurrency(), inputs * outputs / THREAD_BYTES);
    const size_t parts = std::clamp<size_t>(most, 1, num_panels());
    std::vector<std::future<void>> others;
    for (size_t index = 1; index < parts; ++index)
        others.push_back(std::async(std::launch::async, part, num_panels() * index / parts, num_panels() * (index + 1) / parts));
    part(0, num_panels() / parts);
    for (std::future<void>& other : others) other.get();
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
