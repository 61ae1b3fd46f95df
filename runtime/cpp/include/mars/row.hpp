// One sequence of a batch: its tokens, its cursor, what it asked for and how it ended. Knows nothing of the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <mars/backend.hpp>
#include <mars/config.hpp>
#include <mars/export.hpp>
#include <mars/pass_rates.hpp>
#include <mars/stats.hpp>

namespace mars {

enum class FinishReason { eos, stop, length, capacity, cancelled };

MARS_API std::string_view to_string(FinishReason reason);

/// What one step gave one row. `finish_reason` is set in the row's last event, which may carry no tokens.
struct Accepted {
    std::int64_t row = 0;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    std::optional<FinishReason> finish_reason;
};

/// Consecutive predictions for one row, the first for its next unknown position; `logits` is empty or [size, vocab_size].
struct MARS_API Predictions {
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    std::vector<float> logits;
    std::int64_t vocab_size = 0;

    /// The first `count` predictions of batch row `row`, with the confidence that `metric` names.
    static Predictions of(const StepOutput& output, std::int64_t row, std::int64_t count, Metric metric);

    /// These predictions followed by `later` ones.
    Predictions then(const Predictions& later) const;
};

/// A sequence being decoded.
///
/// `tokens` is the prompt and everything accepted; `cursor` counts its final KV entries, so that what lies beyond is
/// pending. `stop` sees each accepted token and says whether it completes a stop condition.
class MARS_API Row {
  public:
    Row(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
        std::function<bool(std::int64_t)> stop = nullptr);

    const std::int64_t index;
    std::vector<std::int64_t> tokens;
    std::int64_t cursor = 0;
    std::optional<FinishReason> finish_reason;
    Stats stats;
    PassRates pass_rates;

    const GenerationConfig& config() const { return config_; }
    std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens.size()); }
    std::int64_t num_pending() const { return num_tokens() - cursor; }

    /// Tokens that may still be generated.
    std::int64_t remaining() const { return config_.max_new_tokens - stats.tokens; }

    /// How many predictions the next step should make: one in one-token mode, never more than can be used.
    std::int64_t look_ahead(std::int64_t block) const;

    /// Accept from the left what the rule and the limits allow, and note how the row ends if it does.
    Accepted take(const Predictions& predictions);

    /// End the row without tokens.
    Accepted finish(FinishReason reason);

    /// Any thread: the tau from the next step on. The caller has checked it.
    void set_tau(double tau) { wanted_tau_.store(tau); }
    double tau() const { return wanted_tau_.load(); }

    /// Any thread: end the row before its next step.
    void cancel() { cancelled_.store(true); }

    /// Take over what other threads asked for. The loop calls this between two steps, so that one step sees one tau.
    void refresh();

  private:
    Predictions candidates(const Predictions& predictions) const;

    GenerationConfig config_;
    std::vector<std::int64_t> eos_ids_;
    std::function<bool(std::int64_t)> stop_;
    std::atomic<double> wanted_tau_;
    std::atomic<bool> cancelled_{false};
};

} // namespace mars
