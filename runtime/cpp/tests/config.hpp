// The settings that tests of rows and requests ask with: all masks, and no end but the length.
#pragma once

#include <cstdint>
#include <optional>

#include <mars/config.hpp>

/// Without a tau: exact.
inline mars::GenerationConfig config_of(std::optional<double> tau, std::int64_t max_new_tokens = 24) {
    mars::GenerationConfig config;
    config.tau = tau;
    config.max_new_tokens = max_new_tokens;
    config.masks = mars::all_masks;
    config.eos_ids.emplace();
    return config;
}
