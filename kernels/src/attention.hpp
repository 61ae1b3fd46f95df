// Attention over KV entries in 8 bits, the function `mars_export::Attention` of w8a8 graphs (docs/format.md): every sum is of integers, and
// every other operation is rounded by itself, in the order of the standard nodes.
//
// An entry of a head is `head_dim` codes and two bytes for their scale. Keys and queries are rotated by a Hadamard matrix before they
// become codes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace mars::kernels {

constexpr size_t SCALE_BYTES = 2;
constexpr size_t MOST_DIMS = 512; // of a head: sums of its products fit into the number of bits

// Arrays and sizes of one call, as in the graph.
struct Attention {
    const float *q, *k, *v; // [rows, heads, slots, head_dim], [rows, kv_heads, slots, head_dim] twice
    int8_t *keys, *values;  // entries [rows, kv_heads, capacity, head_dim + SCALE_BYTES]
    const int64_t* start;   // final entries of each row: slot s is entry start + s
    float scale;            // of scores
    int64_t window;         // entries that a slot sees, with its own
    float* out;             // [rows, slots, heads, head_dim]
    size_t rows, heads, kv_heads, slots, capacity, head_dim;

    size_t entry_bytes() const { return head_dim + SCALE_BYTES; }
    size_t group() const { return heads / kv_heads; }
    // Slots that are computed at once. Their scores must fit into a cache, and keys are unpacked once for all of them.
    size_t slots_of_tile(size_t queries) const { return std::max<size_t>(1, (capacity > 16384 ? queries / 3 : queries) / group()); }
    size_t num_tiles(size_t queries) const { return (slots + slots_of_tile(queries) - 1) / slots_of_tile(queries); }
};

// The code of an instruction set.
struct AttentionCode {
    const char* name; // of the InstructionSet
    size_t queries;   // of a tile
    // Write the entries of a row's head.
    void (*write)(const Attention& call, size_t row, size_t kv_head);
    // The slots of a tile, of all heads that share a key head.
    void (*attend)(const Attention& call, size_t row, size_t kv_head, size_t tile);
};

extern const AttentionCode attention_portable;
#ifdef __x86_64__
extern const AttentionCode attention_avx512_vnni, attention_avx_vnni, attention_avx2;
#ifdef __linux__
extern const AttentionCode attention_amx_int8;
#endif
#endif

// The code for an instruction set's processors.
const AttentionCode& attention_code(const char* instructions);

// `run(count, part)` calls part(0) to part(count - 1), on several threads.
template <class Run>
void attend(const AttentionCode& code, const Attention& call, Run run) {
    const size_t heads = call.rows * call.kv_heads, tiles = call.num_tiles(code.queries);
    const auto write = [&code, &call](size_t head) { code.write(call, head / call.kv_heads, head % call.kv_heads); };
    if (call.slots * heads > 64)
        run(heads, write);
    else
        for (size_t head = 0; head < heads; ++head) write(head);
    // The last tiles see the most entries: they begin first.
    run(heads * tiles, [&code, &call, heads, tiles](size_t index) {
        const size_t head = index % heads;
        code.attend(call, head / call.kv_heads, head % call.kv_heads, tiles - 1 - index / heads);
    });
}

} // namespace mars::kernels
