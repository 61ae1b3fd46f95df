// A short list.
#include "device/ort_kept.hpp"

#include <algorithm>
#include <iterator>

#include "device/ort_memory.hpp"

namespace mars {

std::int64_t doubled(std::int64_t needed, std::int64_t present) {
    std::int64_t entries = std::max(least_entries, present);
    while (entries < needed) entries *= 2;
    return entries;
}

KeptBlocks::KeptBlocks() = default;

KeptBlocks::~KeptBlocks() = default;

std::vector<OrtBlock> KeptBlocks::take(KvShape shape) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (idle_.size() > most_idle) idle_.pop_front();
    const auto at = std::find_if(idle_.rbegin(), idle_.rend(), [&](const auto& each) { return each.first == shape; });
    if (at == idle_.rend()) return {};
    std::vector<OrtBlock> blocks = std::move(at->second);
    idle_.erase(std::next(at).base());
    return blocks;
}

void KeptBlocks::give(KvShape shape, std::vector<OrtBlock> blocks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.emplace_back(shape, std::move(blocks));
}

void KeptBlocks::clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.clear();
}

} // namespace mars
