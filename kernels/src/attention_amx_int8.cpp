// Attention with AMX. Its products are of bytes, so codes of queries and weights are two: sums stay exact.
#include "attention_avx512.hpp"

namespace {

constexpr size_t LINES = 16, BYTES = 64, SIZE = LINES * BYTES; // of a register
constexpr size_t EXACT_BYTES = 1 << 16;                        // entries whose sums of bytes fit into 32 bits

struct Few : Avx512Vnni {
    static constexpr size_t QUERIES = 48;
};
struct Many : Few {
    static constexpr size_t ENTRIES = BYTES;
};

struct alignas(64) Registers {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES};
    uint8_t lines[16] = {LINES, LINES, LINES, LINES, LINES, LINES, LINES, LINES};
};

// Memory of a thread. Queries are those of a tile and as many more as fill up registers. The high bytes of numbers, then the low ones.
struct Bytes {
    Buffer<int8_t> queries[2]; // codes [parts, queries, BYTES]; a part is 64 dimensions
    Buffer<int8_t> weights[2]; // [count / BYTES, queries, BYTES]
    Buffer<int8_t> values;     // [parts, 4, count / 4, BYTES], see `unpack_values`
    Buffer<int32_t> sums;      // [queries / LINES, 2, LINES, LINES]
};

inline Bytes& own_bytes() {
    static thread_local Bytes made;
    return made;
}

class AmxTile : public Tile<Many> {
  public:
    using Tile::Tile;

  private:
    void score() override {
        for (auto& numbers : bytes.queries) numbers.clear(parts * stored * BYTES);
        for (size_t r = 0; r < queries; ++r)
            for (size_t d = 0; d < dims; d += BYTES / 2) { // their second and third of four numbers change places
                const auto there = static_cast<__mmask32>(~uint32_t{0} >> (BYTES / 2 - std::min(BYTES / 2, dims - d)));
                __m512i codes = _mm512_maskz_loadu_epi16(there, &own.codes[r * dims + d]);
                codes = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(codes, 0xd8), 0xd8);
                const size_t place = (d / BYTES * stored + r) * BYTES + d % BYTES;
                store_bytes(&bytes.queries[0][place], _mm512_srai_epi16(codes, 8));
                store_bytes(&bytes.queries[1][place], codes);
            }
        alignas(64) int8_t keys_of_step[MOST_DIMS * LINES] = {};
        bytes.sums.resize(2 * stored * LINES);
        for (size_t j = begin; j < end; j += LINES) {
            unpack_keys(j, [&](size_t d, const int8_t* first, size_t apart) {
                Few::transpose(first, apart, [&](size_t i, __m512i four) { _mm512_store_si512(keys_of_step + (d + i) * LINES, four); });
            });
            for (size_t r = 0; r < stored; r += LINES) {
                _tile_zero(0);
                _tile_zero(1);
                for (size_t part = 0; part < parts; ++part) {
                    _tile_loadd(2, bytes.queries[0].data() + (part * stored + r) * BYTES, BYTES);
                    _tile_loadd(3, bytes.queries[1].data() + (part * stored + r) * BYTES, BYTES);
                    _tile_loadd(4, keys_of_step + part * SIZE, BYTES);
                    _tile_dpbssd(0, 2, 4);
                    _tile_dpbusd(1, 3, 4);
                }
                _tile_stored(0, &bytes.sums[2 * r * LINES], BYTES);
                _tile_stored(1, &bytes.sums[(2 * r + LINES) * LINES], BYTES);
            }
            const __m512 scales = _mm512_loadu_ps(&own.key_scales[j - begin]);
            for (size_t r = 0; r < queries; ++r) {
                const int32_t* high = &bytes.sums[(2 * (r / LINES * LINES) + r % LINES) * LINES];
                const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(Few::load(high), 8), Few::load(high + LINES * LINES));
                _mm512_storeu_ps(&own.scores[r * count + j - begin], _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales));
            }
        }
    }

    static void store_bytes(int8_t* to, __m512i numbers) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(numbers));
    }

    void mix() override {
        for (auto& numbers : bytes.weights) numbers.resize(stored * count);
        for (size_t r = 0; r < queries; ++r)
            for (size_t j = 0; j < count; j += BYTES / 2) {
                const __m512i weights = _mm512_loadu_si512(&own.weights[r * count + j]);
                const size_t place = (j / BYTES * stored + r) * BYTES + j % BYTES;
                store_bytes(&bytes.weights[0][place], _mm512_srli_epi16(weights, 8));
                store_bytes(&bytes.weights[1][place], weights);
            }
        unpack_all_values();
        for (size_t part = 0; part < parts; ++part)
            for (size_t r = 0; r < queries; r += LINES) {
                int64_t totals[4 * LINES * LINES] = {};
                for (size_t from = 0; from < count; from += EXACT_BYTES)
                    for (size_t byte = 0; byte < 2; ++byte) add_up(part, r, from, byte, totals);
                for (size_t i = 0; i < std::min(LINES, queries - r); ++i)
                    for (size_t d = 0; d < std::min(BYTES, call.head_dim - part * BYTES); ++d)
                        out(r + i)[part * BYTES + d] =
                            static_cast<float>(totals[(d / 4 % 4 * LINES + i) * LINES + d / 16 * 4 + d % 4]) * own.factors[r + i];
            }
    }

    // Adds the products of high or low bytes, totals [4, LINES, LINES].
    void add_up(size_t part, size_t r, size_t from, size_t byte, int64_t* totals) {
        alignas(64) int32_t sums[4 * LINES * LINES];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const size_t apart = count / 4 * BYTES;
        for (size_t j = from; j < std::min(from + EXACT_BYTES, count); j += BYTES) {
            const int8_t* values_of_step = bytes.values.data() + part * 4 * apart + j / 4 * BYTES;
            _tile_loadd(4, bytes.weights[byte].data() + j * stored + r * BYTES, BYTES);
            _tile_loadd(5, values_of_step, BYTES);
            _tile_loadd(6, values_of_step + apart, BYTES);
            _tile_dpbusd(0, 4, 5);
            _tile_dpbusd(1, 4, 6);
            _tile_loadd(5, values_of_step + 2 * apart, BYTES);
            _tile_loadd(6, values_of_step + 3 * apart, BYTES);
            _tile_dpbusd(2, 4, 5);
            _tile_dpbusd(3, 4, 6);
        }
        _tile_stored(0, sums, BYTES);
        _tile_stored(1, sums + 1 * LINES * LINES, BYTES);
        _tile_stored(2, sums + 2 * LINES * LINES, BYTES);
        _tile_stored(3, sums + 3 * LINES * LINES, BYTES);
        for (size_t i = 0; i < 4 * LINES * LINES; ++i) totals[i] += static_cast<int64_t>(sums[i]) * (byte ? 1 : 256);
    }

    // Four entries side by side. Line i of four has the dimensions 4 i to 4 i + 3 of each 16.
    void unpack_all_values() {
        const size_t apart = count / 4 * BYTES;
        bytes.values.resize(parts * 4 * apart);
        for (size_t part = 0; part < parts; ++part) {
            const auto dims_there = ~uint64_t{0} >> (BYTES - std::min(BYTES, call.head_dim - part * BYTES));
            for (size_t j = 0; j < count; j += 4) {
                __m512i x[4];
                for (size_t i = 0; i < 4; ++i)
                    x[i] = _mm512_maskz_loadu_epi8(begin + j + i < end ? dims_there : 0, value(begin + j + i) + part * BYTES);
                const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
                const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), d = _mm512_unpackhi_epi8(x[2], x[3]);
                int8_t* to = bytes.values.data() + part * 4 * apart + j / 4 * BYTES;
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + apart, _mm512_unpackhi_epi16(a, b));
                _mm512_storeu_si512(to + 2 * apart, _mm512_unpacklo_epi16(c, d));
                _mm512_storeu_si512(to + 3 * apart, _mm512_unpackhi_epi16(c, d));
            }
        }
    }

    const size_t parts = (call.head_dim + BYTES - 1) / BYTES;
    const size_t stored = rounded_up(queries, LINES);
    Bytes& bytes = own_bytes();
};

void attend_tile_amx(const Attention& call, size_t row, size_t kv_head, size_t tile) {
    // Of fewer numbers the arranging takes longer than it saves.
    if (call.slots * call.group() < LINES || static_cast<size_t>(call.start[row]) + call.slots < 512)
        return attend_tile<Few>(call, row, kv_head, tile);
    const Registers registers;
    _tile_loadconfig(&registers);
    AmxTile(call, row, kv_head, tile).compute();
    _tile_release();
}

} // namespace

namespace mars::kernels {
const AttentionCode attention_amx_int8{"amx_int8", Few::QUERIES, write, attend_tile_amx};
}
