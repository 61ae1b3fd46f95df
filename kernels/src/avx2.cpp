#include <immintrin.h>

#include "quantize.hpp"
#include "quantize_avx2.hpp"
#include "store_avx2.hpp"
#include "tile.hpp"

namespace {

// Without VNNI two byte products are added in 16 bits: |weight| times a signed code, whose bits are inverted where the weight is negative.
// The inverse of a code is less than its opposite by 1, so a column's sums lack its negative weights. Most sums of a block's two groups
// are added in 16 bits, too, because widening them costs as much as a product.
struct Avx2 : CopiedSizes<8, 8, 10> {
    static constexpr bool ADDS_IN_16_BITS = true;
    using Sums = __m256i;
    struct Group {
        __m256i sizes, inverted;

        explicit Group(const int8_t* weights) {
            const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
            sizes = _mm256_abs_epi8(all);
            inverted = _mm256_cmpgt_epi8(_mm256_setzero_si256(), all);
        }
        __m256i times(const uint8_t* codes) const {
            return _mm256_maddubs_epi16(sizes, _mm256_xor_si256(_mm256_set1_epi32(four(codes)), inverted));
        }
    };
    struct Weights {
        Group low, high;
    };

    static Weights load(const int8_t* block) { return {Group(block), Group(block + LINE)}; }

    static void add_together(Sums& sums, const Weights& weights, const uint8_t* codes) {
        widen(sums, _mm256_add_epi16(weights.low.times(codes), weights.high.times(codes + 4)));
    }

    static void add(Sums& sums, const Weights& weights, const uint8_t* codes) {
        widen(sums, weights.low.times(codes));
        widen(sums, weights.high.times(codes + 4));
    }

    static void widen(Sums& sums, __m256i pairs) { sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }

    static void store(Sums sums, size_t, const int32_t* middles, const float* steps, float largest, float* out) {
        store_avx2(sums, middles, steps, largest, out);
    }
};

// The products of a group with weights from 0 to 15 are added in 16 bits.
struct Avx2FourBits : FourBitsAvx2<6> {
    struct Factors : Bytes {
        __m256i of[2];

        explicit Factors(const int8_t* bytes) : Bytes(bytes) {
            zeros = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_mullo_epi16(both, zeros));
            const __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(both, 16);
            of[0] = _mm256_or_si256(low, _mm256_slli_epi32(low, 16));
            of[1] = _mm256_or_si256(high, _mm256_slli_epi32(high, 16));
        }
    };

    static void add(Sums& sums, const Weights& weights, __m256i factor, const uint8_t* codes, int32_t) {
        __m256i pairs = _mm256_maddubs_epi16(weights.of[0], codes_of(codes));
#pragma GCC unroll 8
        for (size_t i = 1; i < 8; ++i) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights.of[i], codes_of(codes + 4 * i)));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, factor));
    }

    static void add_zeros(Sums& sums, const Factors& factors, const int16_t* both) {
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(factors.zeros, codes_of(both)));
    }
};

// Finds the blocks whose two groups are added in 16 bits, whatever the codes are, and sums up negative weights.
void prepare(Packed& weights, size_t from, size_t to) {
    constexpr int MOST = 32768 / 128; // of the weights whose products with codes are added in one number of 16 bits
    const size_t num_blocks = weights.num_blocks * (mars::kernels::BLOCK / Avx2::INPUTS), of_panel = Avx2::LAYOUT.columns;
    const __m256i one = _mm256_set1_epi8(1);
    for (size_t column = from * of_panel; column < to * of_panel; column += Avx2::COLUMNS) {
        const int8_t* block = weights.panels + column / of_panel * weights.panel_bytes + column % of_panel * num_blocks * Avx2::INPUTS;
        uint16_t* const place = weights.place.data() + column / Avx2::COLUMNS * num_blocks;
        size_t together = 0, alone = num_blocks;
        __m256i sums = _mm256_setzero_si256();
        for (size_t i = 0; i < num_blocks; ++i, block += 2 * Avx2::LINE) {
            const auto [low, high] = Avx2::load(block);
            const __m256i sizes = _mm256_add_epi16(_mm256_maddubs_epi16(low.sizes, one), _mm256_maddubs_epi16(high.sizes, one));
            const bool is_larger = _mm256_movemask_epi8(_mm256_cmpgt_epi16(sizes, _mm256_set1_epi16(MOST))) != 0;
            place[is_larger ? --alone : together++] = static_cast<uint16_t>(i);
            const auto negative = [one](const Avx2::Group& group) {
                return _mm256_maddubs_epi16(_mm256_and_si256(group.sizes, group.inverted), one);
            };
            sums = _mm256_sub_epi32(sums, _mm256_madd_epi16(_mm256_add_epi16(negative(low), negative(high)), _mm256_set1_epi16(1)));
        }
        weights.num_together[column / Avx2::COLUMNS] = together;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights.middles.data() + column), sums);
    }
}

bool is_here() { return mars::kernels::Processor().avx2; }

} // namespace

namespace mars::kernels {

template <size_t Block, bool IsSigned>
void quantize_avx2(const float* x, size_t rows, size_t inputs, uint8_t* codes, float* largest) {
    const __m256 sign = _mm256_set1_ps(-0.0f), step = _mm256_set1_ps(CODE_STEP), low = _mm256_set1_ps(-127), high = _mm256_set1_ps(127);
    const __m128i middle = _mm_set1_epi8(IsSigned ? 0 : -128);
    const size_t even = inputs / 8 * 8;
    for (size_t row = 0; row < rows; ++row, x += inputs) {
        __m256 most = _mm256_setzero_ps();
        for (size_t i = 0; i < even; i += 8) most = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)), most);
        float lanes[8];
        _mm256_storeu_ps(lanes, most);
        largest[row] = largest_of(x, inputs, even, lanes, 8);
        const __m256 divisor = _mm256_set1_ps(largest[row]);
        for (size_t i = 0; i < even; i += 8) {
            const __m256 units = _mm256_div_ps(_mm256_div_ps(_mm256_loadu_ps(x + i), divisor), step);
            const __m256i wide = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(units, low), high)); // not a number: low
            const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const __m128i bytes = _mm_add_epi8(_mm_packs_epi16(words, words), middle);
            const int64_t eight = _mm_cvtsi128_si64(bytes);
            constexpr size_t PART = Block < 8 ? Block : 8;
            for (size_t part = 0; part < 8; part += PART)
                std::memcpy(codes + code_place<Block>(i + part, row, rows), reinterpret_cast<const char*>(&eight) + part, PART);
        }
        for (size_t i = even; i < inputs; ++i) codes[code_place<Block>(i, row, rows)] = code_of(x[i], largest[row]) ^ (IsSigned ? 0x80 : 0);
    }
}

template void quantize_avx2<4, false>(const float*, size_t, size_t, uint8_t*, float*);
template void quantize_avx2<64, true>(const float*, size_t, size_t, uint8_t*, float*);

static const InstructionSet four_bits = set_of<Avx2FourBits>("avx2", is_here, quantize_groups<quantize_avx2<BLOCK, true>>);
const InstructionSet avx2 = set_of<Avx2>("avx2", is_here, quantize_avx2<Avx2::INPUTS, true>, &four_bits, prepare);

} // namespace mars::kernels
