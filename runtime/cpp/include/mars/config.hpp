// What a request may ask for. Values are checked before they are used.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/accept.hpp>
#include <mars/export.hpp>

namespace mars {

/// A window: the most predictions made in one step, 1 or more; or one of these.
constexpr std::int64_t auto_window = 0;  ///< as many as is fastest, at most the bundle's block, chosen step by step
constexpr std::int64_t full_window = -1; ///< the bundle's block

/// "auto", "full" or a number of 1 or more; nothing for other texts.
MARS_API std::optional<std::int64_t> window_of(std::string_view text);

/// Settings of one request.
struct MARS_API GenerationConfig {
    double tau = 0.95;                   ///< confidence bound, the speed/quality knob; >= 1 (entropy: <= 0) is one-token mode
    Metric metric = Metric::probability; ///< what tau bounds: probability, margin (top-2) or entropy (nats)
    std::int64_t max_new_tokens = 256;
    std::int64_t window = auto_window;                ///< most predictions made in one step
    std::optional<std::vector<std::int64_t>> eos_ids; ///< the model's own by default
    std::vector<std::string> stop;                    ///< strings that end the text and are not part of it
    double temperature = 0.0;                         ///< 0 is greedy; above it a candidate's own probability is compared with tau
    std::int64_t top_k = 0;                           ///< 0 is off
    double top_p = 1.0;                               ///< 1 is off
    std::uint64_t seed = 0;                           ///< draws depend on it and on the position only
    double repetition_penalty = 1.0;                  ///< 1 is off

    /// Throws SessionError that lists every value out of range.
    void check() const;

    bool is_greedy() const { return temperature == 0; }

    /// Whether tokens are chosen from logits on the host, rather than by the graph's own argmax.
    bool needs_logits() const { return !is_greedy() || repetition_penalty != 1; }

    bool one_token() const { return is_one_token(tau, metric); }
};

} // namespace mars
