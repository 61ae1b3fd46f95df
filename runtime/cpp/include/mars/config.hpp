// Settings of a request, and shared types of a session.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/export.hpp>

namespace mars {

/// The confidence that tau is compared with.
enum class Metric { probability, margin, entropy };

/// The metric's name in the manifest and on the command line.
MARS_API std::string_view to_string(Metric metric);

/// The most mask slots of a step: a number of 0 or more, or one of these.
constexpr std::int64_t auto_masks = -1; ///< chosen at each step for the highest speed
constexpr std::int64_t all_masks = -2;  ///< as many as the block allows

/// Parse "auto", "full" or a number of 0 or more; no value for other texts.
MARS_API std::optional<std::int64_t> masks_of(std::string_view text);

constexpr double default_tau = 0.95; ///< from the paper's tables; used if a tau is needed and none is given

/// When a bundle's files are hashed: unless an earlier start verified them, always, or never.
///
/// Presence, sizes and the manifest's checksum are checked in any case.
enum class Verify { once, always, never };

/// Severity of a log line.
enum class LogLevel { debug, info, warning, error };

/// Receives a session's log, one line at a time, from any thread. Its exceptions are dropped.
using OnLog = std::function<void(LogLevel, std::string_view)>;

/// Settings of one request.
///
/// Exact mode is the default: several tokens a step, and the text of one token at a time. A tau trades quality for
/// speed and turns exact mode off; giving both is an error.
struct GenerationConfig {
    std::optional<double> tau = {};      ///< confidence bound; >= 1 (entropy: <= 0) is one token a step
    std::optional<bool> exact = {};      ///< default: true if no tau is given
    Metric metric = Metric::probability; ///< what tau is compared with: probability, margin (top-2) or entropy (nats)
    std::int64_t max_new_tokens = 256;
    std::int64_t masks = auto_masks; ///< most mask slots of a step
    std::int64_t prompt_lookup = 0;  ///< exact only: propose what followed the last `prompt_lookup` tokens before; 0 is off
    std::optional<std::vector<std::int64_t>> eos_ids = {}; ///< default: the model's own
    std::vector<std::string> stop = {};                    ///< strings that end the text and are not part of it
    double temperature = 0.0;            ///< 0 is greedy; otherwise the drawn token's own probability is compared with tau
    std::int64_t top_k = 0;              ///< 0 is off
    double top_p = 1.0;                  ///< 1 is off
    double min_p = 0.0;                  ///< keep tokens at least this likely relative to the likeliest; 0 is off
    std::uint64_t seed = 0;              ///< draws depend only on it and the position
    double repetition_penalty = 1.0;     ///< 1 is off
    std::optional<double> deadline = {}; ///< seconds after which the answer ends; above 0
    std::string cache_salt = {};         ///< only requests with the same salt share KV entries
    std::string grammar = {};            ///< name of a grammar of the bundle that the answer follows; empty: none
    bool masks_of_tau = false;           ///< whether masks came with the tau, as of a profile; exact mode sets them to auto

    /// Throws SessionError that lists every value out of range.
    MARS_API void check() const;

    /// Whether the likeliest token is chosen, without a draw.
    bool is_greedy() const { return temperature == 0; }

    /// Whether tokens are chosen from logits on the host instead of by the graph's argmax.
    bool needs_logits() const { return !is_greedy() || repetition_penalty != 1; }

    /// Whether the text is that of one token at a time.
    bool is_exact() const { return exact.value_or(!tau); }

    /// The tau of a request that is not exact.
    double bound() const { return tau.value_or(default_tau); }

    /// Whether every step accepts exactly one token.
    MARS_API bool one_token() const;

    /// This config with all masks if its text would otherwise depend on measured costs: sampling or a seed, at a
    /// tau, without masks chosen by the user. Exact mode does not depend on the number of masks.
    MARS_API GenerationConfig repeatable(bool has_masks, bool has_seed) const;

    /// This config with what a profile sets: tau, metric and masks.
    MARS_API GenerationConfig with_profile(const GenerationConfig& profile) const;
};

} // namespace mars
