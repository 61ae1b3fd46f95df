// What a request may ask for, and words of a session. Values are checked before they are used.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/export.hpp>

namespace mars {

/// What a tau bounds.
enum class Metric { probability, margin, entropy };

/// Name of a metric, as the manifest and the command line spell it.
MARS_API std::string_view to_string(Metric metric);

/// A window: the most predictions made in one step, 1 or more; or one of these.
constexpr std::int64_t auto_window = 0;  ///< as many as is fastest, chosen step by step
constexpr std::int64_t full_window = -1; ///< the bundle's block

/// "auto", "full" or a number of 1 or more; nothing for other texts.
MARS_API std::optional<std::int64_t> window_of(std::string_view text);

constexpr double default_tau = 0.95; ///< of the paper's tables, where tau is wanted and not given

/// Whether a bundle's files are hashed when it is opened: never, where an earlier start did not find them good, or always.
///
/// Presence, sizes and the manifest's own checksum are looked at in any case.
enum class Verify { never, once, always };

/// How much a line of the log matters.
enum class LogLevel { debug, info, warning, error };

/// Hears what a session has to say, one line at a time, from any thread. What it throws is dropped.
using OnLog = std::function<void(LogLevel, std::string_view)>;

/// Settings of one request.
///
/// Exact mode is the default: several tokens a step, and the very text of one-token decoding. A tau instead is the speed/quality knob;
/// giving a tau turns exact off, giving both is an error.
struct GenerationConfig {
    std::optional<double> tau = {};      ///< confidence bound; >= 1 (entropy: <= 0) is one-token mode
    std::optional<bool> exact = {};      ///< by default: where no tau is given
    Metric metric = Metric::probability; ///< what tau bounds: probability, margin (top-2) or entropy (nats)
    std::int64_t max_new_tokens = 256;
    std::int64_t window = auto_window;                     ///< most predictions of new positions made in one step
    std::int64_t lookup = 0;                               ///< propose what followed the last so many tokens before (exact only); 0 is off
    std::optional<std::vector<std::int64_t>> eos_ids = {}; ///< the model's own by default
    std::vector<std::string> stop = {};                    ///< strings that end the text and are not part of it
    double temperature = 0.0;                              ///< 0 is greedy; above it a candidate's own probability is compared with tau
    std::int64_t top_k = 0;                                ///< 0 is off
    double top_p = 1.0;                                    ///< 1 is off
    double min_p = 0.0;                                    ///< keep tokens at least that much as likely as the likeliest; 0 is off
    std::uint64_t seed = 0;                                ///< draws depend on it and on the position only
    double repetition_penalty = 1.0;                       ///< 1 is off
    std::optional<double> deadline = {};                   ///< seconds after which the answer ends with what it has; above 0
    std::string cache_salt = {};                           ///< only requests with the same one share KV entries
    std::string grammar = {};                              ///< the name of a grammar of the bundle that the answer follows; empty: none

    /// Throws SessionError that lists every value out of range.
    MARS_API void check() const;

    bool is_greedy() const { return temperature == 0; }

    /// Whether tokens are chosen from logits on the host, rather than by the graph's own argmax.
    bool needs_logits() const { return !is_greedy() || repetition_penalty != 1; }

    bool is_exact() const { return exact.value_or(!tau); }

    /// The tau that counts where the request is not exact.
    double bound() const { return tau.value_or(default_tau); }

    /// Whether it asks for exactly one token a step.
    MARS_API bool one_token() const;

    /// The same with full windows where a text that is drawn, or asked for with a seed, would else depend on measured costs: at a tau,
    /// unless the user chose a window. Exact mode does not depend on windows.
    MARS_API GenerationConfig repeatable(bool has_window, bool has_seed) const;
};

} // namespace mars
