// Both loops over given sequences, as tests/support/loops.py has them for Python.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "decode/blocks.hpp"

namespace loops {

/// Decode `seqs` with cursor commit. `backend` and `seqs` must outlive the result.
inline std::unique_ptr<mars::Run> decode(mars::Backend& backend, const std::vector<mars::Sequence*>& seqs, std::int64_t block,
                                         std::int64_t mask_id, std::optional<mars::StepPlanner> planner = std::nullopt) {
    const mars::KvBudget budget{static_cast<std::int64_t>(seqs.size())};
    auto schedule = std::make_unique<mars::Schedule>(backend, block, mask_id, mars::prefill_chunk, budget, std::move(planner));
    return std::make_unique<mars::Run>(std::move(schedule), seqs);
}

/// Decode `seqs` with block commit. Throws as check_blocks.
inline std::unique_ptr<mars::Run> decode_blocks(mars::Backend& backend, const std::vector<mars::Sequence*>& seqs, std::int64_t block,
                                                std::int64_t mask_id, std::int64_t cache_block) {
    mars::check_blocks(backend, seqs, cache_block);
    const auto num_rows = static_cast<std::int64_t>(seqs.size());
    return std::make_unique<mars::Run>(std::make_unique<mars::BlockSchedule>(backend, block, mask_id, num_rows, cache_block), seqs);
}

/// One whole iteration.
inline std::vector<mars::Accepted> iterate(mars::Schedule& schedule) {
    std::vector<mars::Accepted> accepted;
    schedule.steps([&](const mars::Accepted& each) { accepted.push_back(each); });
    return accepted;
}

} // namespace loops
