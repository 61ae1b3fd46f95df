#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "memory.hpp"
#include "product.hpp"
#include "quantize.hpp"

namespace mars::kernels {

namespace {

constexpr size_t THREAD_BYTES = 1 << 20; // of weights, for which a thread is worth its start

// Calls part(from, to) for ranges of panels, on several threads.
template <class Part>
void on_all_cores(const Packed& packed, Part part) {
    const size_t panels = packed.num_panels();
    const size_t most = std::min<size_t>(std::thread::hardware_concurrency(), panels * packed.panel_bytes / THREAD_BYTES);
    const size_t parts = std::clamp<size_t>(most, 1, panels);
    std::vector<std::future<void>> others;
    for (size_t index = 1; index < parts; ++index)
        others.push_back(std::async(std::launch::async, part, panels * index / parts, panels * (index + 1) / parts));
    part(0, panels / parts);
    for (std::future<void>& other : others) other.get();
}

} // namespace

Packed::Packed(const InstructionSet& chosen, const int8_t* stored, const float* scales, size_t blocks, size_t num_outputs)
    : set(chosen), num_blocks(blocks), outputs(num_outputs), row_bytes(blocks * (BLOCK + (set.layout.last_bytes ? 0 : sizeof(GroupSums)))),
      panel_bytes(blocks * set.layout.block_bytes + set.layout.last_bytes), middles(num_panels() * set.layout.columns),
      steps(middles.size()), memory(weight_memory(num_panels() * panel_bytes)), panels(memory.get()) {
    for (size_t column = 0; column < outputs; ++column) steps[column] = CODE_STEP * scales[column];
    const size_t columns = set.copied_columns > 0 ? set.copied_columns : set.layout.columns;
    on_all_cores(*this, [this, stored, columns](size_t from, size_t to) {
        for (size_t place = from * panel_bytes; place < to * panel_bytes; place += panel_bytes) {
            int8_t* target = memory.get() + place;
            if (columns == set.layout.columns) {
                std::memcpy(target, stored + place, panel_bytes);
                continue;
            }
            for (size_t column = 0; column < set.layout.columns; column += columns)
                for (size_t four = 0; four < num_blocks * (BLOCK / 4); ++four, target += columns * 4)
                    std::memcpy(target, stored + place + (four * set.layout.columns + column) * 4, columns * 4);
            std::memcpy(target, stored + place + panel_bytes - set.layout.last_bytes, set.layout.last_bytes);
        }
    });
    drop_file_pages(stored, num_panels() * panel_bytes);
    if (set.prepare) {
        constexpr size_t COLUMNS = 8, INPUTS = 8;
        num_together.resize(middles.size() / COLUMNS);
        place.resize(num_together.size() * (blocks * BLOCK / INPUTS));
        on_all_cores(*this, [this](size_t from, size_t to) { set.prepare(*this, from, to); });
    } else if (set.layout.last_bytes) {
        for (size_t panel = 0; panel < num_panels(); ++panel)
            std::memcpy(middles.data() + panel * BYTES.columns, panels + (panel + 1) * panel_bytes - BYTES.last_bytes, BYTES.last_bytes);
        for (int32_t& middle : middles) middle *= 128;
    }
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
