// The loop over given sequences, as tests/support/loops.py has it for Python.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "decode/schedule.hpp"

namespace loops {

inline mars::Limits limits_of(std::int64_t max_rows, std::int64_t prefill_tokens = 128) {
    mars::Limits limits;
    limits.max_rows = max_rows;
    limits.prefill_tokens = prefill_tokens;
    return limits;
}

/// Decode `seqs`. `backend` and `seqs` must outlive the result.
inline std::unique_ptr<mars::Run> decode(mars::Backend& backend, const std::vector<mars::Sequence*>& seqs, std::int64_t block,
                                         std::int64_t mask_id, std::int64_t cache_block = 1,
                                         std::optional<mars::StepPlanner> planner = std::nullopt) {
    mars::Limits limits = limits_of(static_cast<std::int64_t>(seqs.size()), 256);
    limits.cache_block = cache_block;
    return std::make_unique<mars::Run>(std::make_unique<mars::Schedule>(backend, block, mask_id, limits, std::move(planner)), seqs);
}

/// One whole step.
inline std::vector<mars::Accepted> outcomes(mars::Schedule& schedule) {
    std::vector<mars::Accepted> accepted;
    do {
        for (mars::Accepted& each : schedule.step()) accepted.push_back(std::move(each));
    } while (schedule.is_in_step());
    return accepted;
}

} // namespace loops
