// Attention of a few slots over a head's entries. `Isa` has the products, of pairs of 16-bit numbers into LANES sums of 32 bits. Included
// by one file for each instruction set.
#pragma once

#include <new>

#include "attention_numbers.hpp"

namespace {

using mars::kernels::Attention;
using mars::kernels::AttentionCode;

constexpr size_t CHUNK = 16;     // dimensions that are unpacked at once
constexpr size_t VALUES = 128;   // entries whose values are unpacked at once
constexpr size_t EXACT = 512;    // entries whose sums fit into 32 bits
constexpr size_t KEY_ROWS = 8;   // queries whose sums stay in registers
constexpr size_t VALUE_ROWS = 4; // the same for values

inline size_t rounded_up(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

// The first `count` bytes of a chunk, then zeros.
struct Chunk {
    Chunk(const int8_t* from, size_t count) { std::memcpy(bytes, from, count); }
    int8_t bytes[CHUNK] = {};
};

// Numbers of a thread, whose memory only grows. Not std::vector: the linker keeps one copy of its functions for all files, which could be
// one for instructions that this processor lacks.
template <class Number>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { ::operator delete(numbers); }

    void resize(size_t wanted) {
        if (wanted > room) {
            void* const made = ::operator new(wanted * sizeof(Number));
            ::operator delete(numbers);
            numbers = static_cast<Number*>(std::memset(made, 0, wanted * sizeof(Number)));
            room = wanted;
        }
        count = wanted;
    }
    void clear(size_t wanted) { // to zeros
        resize(wanted);
        std::memset(numbers, 0, wanted * sizeof(Number));
    }
    size_t size() const { return count; }
    Number* data() { return numbers; }
    Number& operator[](size_t i) { return numbers[i]; }

  private:
    Number* numbers = nullptr;
    size_t count = 0, room = 0;
};

// Memory of a thread, which stays for the next tile.
struct Scratch {
    Buffer<int16_t> codes, weights;         // [queries, dims], [queries, count]
    Buffer<float> rotated, factors, scores; // [dims], [queries], [queries, count]
    Buffer<float> key_scales, value_scales; // [count]
    Buffer<int32_t> sums, unpacked;         // [queries, dims], pairs [VALUES / 2, dims]
    Buffer<int64_t> totals;                 // [queries, dims]
};

inline Scratch& own_scratch() {
    static thread_local Scratch made;
    return made;
}

template <class Isa>
class Tile {
  public:
    Tile(const Attention& of, size_t row, size_t kv_head, size_t tile)
        : call(of), head(row * call.kv_heads + kv_head), slot(tile * call.slots_of_tile(Isa::QUERIES)),
          slots(std::min(call.slots_of_tile(Isa::QUERIES), call.slots - slot)), queries(slots * call.group()),
          dims(rounded_up(call.head_dim, CHUNK)), stride(call.entry_bytes()), keys(call.keys + head * call.capacity * stride),
          values(call.values + head * call.capacity * stride),
          begin(std::max<int64_t>(0, call.start[row] + static_cast<int64_t>(slot) + 1 - call.window)),
          end(static_cast<size_t>(call.start[row]) + slot + slots), count(rounded_up(end - begin, Isa::ENTRIES)) {
        own.codes.clear(queries * dims);
        own.rotated.resize(dims);
        own.factors.resize(queries);
        own.scores.resize(queries * count);
        own.weights.resize(queries * count);
        own.key_scales.clear(count);
        own.value_scales.clear(count);
        for (size_t j = begin; j < end; ++j) {
            own.key_scales[j - begin] = scale_of(key(j) + call.head_dim);
            own.value_scales[j - begin] = scale_of(value(j) + call.head_dim);
        }
    }

    void compute() {
        for (size_t r = 0; r < queries; ++r) {
            const float* q = call.q + ((query_head(r))*call.slots + slot + r / call.group()) * call.head_dim;
            own.factors[r] = write_query(q, call.head_dim, call.scale, own.rotated.data(), &own.codes[r * dims]);
        }
        score();
        for (size_t r = 0; r < queries; ++r) {
            hide(r);
            own.factors[r] = write_weights(&own.scores[r * count], own.value_scales.data(), count, own.factors[r], &own.weights[r * count]);
        }
        mix();
    }

  protected:
    const int8_t* key(size_t j) const { return keys + j * stride; }
    const int8_t* value(size_t j) const { return values + j * stride; }
    // The number of a query's head among those of all rows.
    size_t query_head(size_t r) const { return head * call.group() + r % call.group(); }

    virtual void score() {
        alignas(64) int32_t pairs[MOST_DIMS / 2 * Isa::LANES];
        for (size_t j = begin; j < end; j += Isa::LANES) {
            unpack_keys(j,
                        [&](size_t d, const int8_t* first, size_t apart) { Isa::unpack_keys(first, apart, pairs + d / 2 * Isa::LANES); });
            for (size_t r = 0; r < queries; r += KEY_ROWS) score_queries<KEY_ROWS>(std::min(KEY_ROWS, queries - r), r, j, pairs);
        }
    }

    // unpack(d, first, apart) for each chunk of LANES entries from j on; of missing numbers there are zeros.
    template <class Unpack>
    void unpack_keys(size_t j, Unpack unpack) const {
        const size_t present = std::min(Isa::LANES, end - j);
        for (size_t d = 0; d < call.head_dim; d += CHUNK) {
            const size_t width = std::min(CHUNK, call.head_dim - d);
            if (present == Isa::LANES && width == CHUNK) {
                unpack(d, key(j) + d, stride);
            } else {
                int8_t padded[Isa::LANES * CHUNK] = {};
                for (size_t l = 0; l < present; ++l) std::memcpy(padded + l * CHUNK, key(j + l) + d, width);
                unpack(d, padded, CHUNK);
            }
        }
    }

    template <size_t Rows>
    void score_queries(size_t rows, size_t r, size_t j, const int32_t* pairs) {
        if constexpr (Rows > 1)
            if (rows < Rows) return score_queries<Rows - 1>(rows, r, j, pairs);
        typename Isa::Vector sums[Rows] = {};
        const int16_t* q = &own.codes[r * dims];
        for (size_t p = 0; p < dims / 2; ++p) {
            const auto keys = Isa::load(pairs + p * Isa::LANES);
#pragma GCC unroll 16
            for (size_t i = 0; i < Rows; ++i) sums[i] = Isa::add_products(sums[i], keys, Isa::pair(q + i * dims + 2 * p));
        }
#pragma GCC unroll 16
        for (size_t i = 0; i < Rows; ++i) Isa::store_scaled(&own.scores[(r + i) * count + j - begin], sums[i], &own.key_scales[j - begin]);
    }

    // Entries after a slot's own, or before its window.
    void hide(size_t r) {
        const size_t later = slots - 1 - r / call.group(), last = end - later - begin;
        float* row = &own.scores[r * count];
        std::fill(row + last, row + count, UNSEEN);
        if (static_cast<int64_t>(last) > call.window) std::fill(row, row + last - call.window, UNSEEN);
    }

    virtual void mix() {
        own.sums.clear(queries * dims);
        own.totals.clear(queries * dims);
        own.unpacked.resize(VALUES / 2 * dims);
        for (size_t j = begin; j < end; j += VALUES) {
            const size_t entries = std::min(VALUES, end - j), pairs = (entries + 1) / 2;
            for (size_t p = 0; p < pairs; ++p) unpack_pair(j + 2 * p, &own.unpacked[p * dims]);
            for (size_t r = 0; r < queries; r += VALUE_ROWS)
                for (size_t d = 0; d < dims;) {
                    const int16_t* row = &own.weights[r * count + j - begin];
                    const size_t rows = std::min(VALUE_ROWS, queries - r);
                    if (d + Isa::WIDTH <= dims) {
                        mix_rows<VALUE_ROWS, Isa::WIDTH / Isa::LANES>(rows, row, pairs, r, d);
                        d += Isa::WIDTH;
                    } else {
                        mix_rows<VALUE_ROWS, CHUNK / Isa::LANES>(rows, row, pairs, r, d);
                        d += CHUNK;
                    }
                }
            if ((j - begin) % EXACT == EXACT - VALUES || j + VALUES >= end)
                for (size_t i = 0; i < own.sums.size(); ++i) {
                    own.totals[i] += own.sums[i];
                    own.sums[i] = 0;
                }
        }
        for (size_t r = 0; r < queries; ++r)
            for (size_t d = 0; d < call.head_dim; ++d) out(r)[d] = static_cast<float>(own.totals[r * dims + d]) * own.factors[r];
    }

    float* out(size_t r) const {
        const size_t place = (head / call.kv_heads * call.slots + slot + r / call.group()) * call.heads;
        return call.out + (place + query_head(r) % call.heads) * call.head_dim;
    }

    // Values of the entries j and j + 1, side by side.
    void unpack_pair(size_t j, int32_t* out) const {
        static constexpr int8_t zeros[CHUNK] = {};
        for (size_t d = 0; d < call.head_dim; d += CHUNK) {
            const size_t width = std::min(CHUNK, call.head_dim - d);
            const int8_t *first = value(j) + d, *second = j + 1 < end ? value(j + 1) + d : zeros;
            if (width == CHUNK)
                Isa::unpack_values(first, second, out + d);
            else
                Isa::unpack_values(Chunk(first, width).bytes, Chunk(second, width).bytes, out + d);
        }
    }

    template <size_t Rows, size_t Vectors>
    void mix_rows(size_t rows, const int16_t* row, size_t pairs, size_t r, size_t d) {
        if constexpr (Rows > 1)
            if (rows < Rows) return mix_rows<Rows - 1, Vectors>(rows, row, pairs, r, d);
        typename Isa::Vector all[Rows][Vectors];
        for (size_t i = 0; i < Rows; ++i)
            for (size_t v = 0; v < Vectors; ++v) all[i][v] = Isa::load(&own.sums[(r + i) * dims + d + v * Isa::LANES]);
        for (size_t p = 0; p < pairs; ++p) {
            const int32_t* from = &own.unpacked[p * dims + d];
            typename Isa::Vector values[Vectors];
#pragma GCC unroll 16
            for (size_t v = 0; v < Vectors; ++v) values[v] = Isa::load(from + v * Isa::LANES);
#pragma GCC unroll 16
            for (size_t i = 0; i < Rows; ++i) {
                const auto two = Isa::pair(row + i * count + 2 * p);
#pragma GCC unroll 16
                for (size_t v = 0; v < Vectors; ++v) all[i][v] = Isa::add_products(all[i][v], values[v], two);
            }
        }
        for (size_t i = 0; i < Rows; ++i)
            for (size_t v = 0; v < Vectors; ++v) Isa::store(&own.sums[(r + i) * dims + d + v * Isa::LANES], all[i][v]);
    }

    const Attention& call;
    const size_t head, slot, slots, queries, dims; // head: of all rows; dims: of a head, with zeros up to a whole chunk
    const size_t stride;                           // of entries
    const int8_t *keys, *values;                   // of this head
    const size_t begin, end, count;                // entries that a slot of the tile sees; count: with zeros up to a whole step
    Scratch& own = own_scratch();
};

void write(const Attention& call, size_t row, size_t kv_head) {
    float rotated[MOST_DIMS];
    const size_t head = row * call.kv_heads + kv_head, first = head * call.capacity + static_cast<size_t>(call.start[row]);
    for (size_t slot = 0; slot < call.slots; ++slot) {
        const size_t from = (head * call.slots + slot) * call.head_dim, to = (first + slot) * call.entry_bytes();
        rotate(call.k + from, call.head_dim, rotated);
        write_entry(rotated, call.head_dim, call.keys + to);
        write_entry(call.v + from, call.head_dim, call.values + to);
    }
}

template <class Isa>
void attend_tile(const Attention& call, size_t row, size_t kv_head, size_t tile) {
    Tile<Isa>(call, row, kv_head, tile).compute();
}

} // namespace
