// runtime/decode/sequence.py: one sequence: its tokens, its cursor, its settings and how it ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/config.hpp>
#include <mars/stats.hpp>

#include "decode/backend.hpp"
#include "decode/draft_tokens.hpp"
#include "decode/estimates.hpp"
#include "decode/exact_planner.hpp"

namespace mars {

class PrefixHandle;

/// The outcome of one step for one sequence. `finish_reason` is set in the sequence's last event, which may carry no tokens; `error` is
/// set if it failed. The first `accepted_draft_tokens` tokens were verified draft tokens; those at the indices `forced` were forced by
/// a grammar.
struct Accepted {
    std::int64_t seq = 0;
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    std::optional<FinishReason> finish_reason;
    std::int64_t accepted_draft_tokens = 0;
    std::exception_ptr error = nullptr;
    std::vector<std::int64_t> forced = {};
};

/// Consecutive predictions for one sequence, the first for its next unknown position. `logits` is empty or [size,
/// vocab_size]; `topk_ids` and `topk_logprobs` are empty or [size, top_k], best first.
///
/// `confidences` are of the metric that the sequence uses, `probabilities` always probabilities. The last `mtp_drafts`
/// predictions are the MTP layer's, as in StepOutput.
struct Predictions {
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences, probabilities;
    std::vector<float> logits;
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> topk_ids = {};
    std::vector<float> topk_logprobs = {};
    std::int64_t top_k = 0, mtp_drafts = 0;

    /// The first `count` predictions of batch row `seq` and the MTP layer's, with confidences of `metric`.
    static Predictions of(const StepOutput& output, std::int64_t seq, std::int64_t count, Metric metric);

    /// The MTP layer's draft tokens, if the step gave the first `count` of `chosen`: none if greedy decoding gives others.
    DraftTokens mtp_draft(const std::vector<std::int64_t>& chosen, std::int64_t count, std::int64_t num_verified) const;
};

/// A sequence being decoded.
///
/// `tokens` is the prompt and everything accepted. `cursor` counts final KV entries; the tokens after it are pending.
/// `draft_tokens` are guesses, not part of the answer until verified. `on_token` sees each accepted token and returns whether
/// it completes a stop condition. `acceptance_rates` are shared by the sequences of a session, or the sequence's own. `prefix_handle`: the sequence's
/// access to the prefix cache, or null. `client`: whose turn the sequence takes in the queue. `mask_limit`: the most masks of a step; no value for the block's.
class Sequence {
  public:
    Sequence(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
             std::function<bool(std::int64_t)> on_token = nullptr, std::shared_ptr<AcceptanceRates> acceptance_rates = nullptr);
    virtual ~Sequence() = default;

    const std::int64_t index;
    std::vector<std::int64_t> tokens;
    std::int64_t cursor = 0;
    std::int64_t num_reproducible = 0; ///< leading entries with the bits that they have in any other sequence; these are cached
    bool is_reproducible = false;      ///< whether the running step extends them
    std::int64_t block = 1;            ///< slots of the blocks that the model was trained for; the schedule sets it, and:
    std::int64_t cache_block = 1;      ///< with a tau the cursor moves when this many tokens are pending
    std::int64_t num_passes = 0;       ///< sequences that started before this one while it waited for memory
    std::optional<FinishReason> finish_reason;
    Stats stats;
    PassRates pass_rates;
    DraftTokens draft_tokens;
    std::shared_ptr<PrefixHandle> prefix_handle;
    std::optional<std::string> client;
    std::optional<std::int64_t> mask_limit;

    const GenerationConfig& config() const { return config_; }
    std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens.size()); }
    std::int64_t num_pending() const { return num_tokens() - cursor; }
    std::int64_t remaining() const { return config_.max_new_tokens - stats.tokens; }

    /// Tokens of the prompt after which the prefix cache copies the states; no value for no such place.
    std::optional<std::int64_t> next_copy() const;

    /// Whether its prompt is being read: no forward of it has had outputs.
    bool is_prefilling() const { return stats.forwards == 0; }

    /// Draft tokens that may be fed. Never one that ends the sequence: the output before it predicts the same.
    std::int64_t num_draft_tokens() const;

    /// Whether a step must return logits, or the likeliest tokens, for this sequence.
    virtual bool wants_logits() const { return config_.needs_logits(); }
    virtual bool wants_topk() const { return false; }

    /// Whether a step may verify draft tokens, and feed up to two masks more than the block was trained for.
    virtual bool feeds_draft_tokens() const { return config_.is_exact(); }

    /// Whether draft token `i` exists and ends the sequence.
    bool ends_at(std::int64_t i) const;

    /// Whether the cursor waits for a whole cache block: with a tau. Draft tokens need it to move.
    bool commits_blocks() const { return cache_block > 1 && !feeds_draft_tokens(); }

    /// Whether the pending tokens become final in the next step.
    bool is_full() const { return is_prefilling() || !commits_blocks() || num_pending() >= cache_block; }

    /// Most masks that the next step may feed without draft tokens; no more than can be used, and none after the end of the cache block.
    std::int64_t max_masks() const;

    /// Most masks, after `num_drafts` draft tokens, whose predictions fit in the rest of the answer: the step gives one token besides, and in
    /// exact mode the step that verifies them gives another.
    std::int64_t usable_masks(std::int64_t num_drafts = 0) const;

    /// All pending tokens, all draft tokens, and as many masks as are allowed and fit in `room` slots.
    StepPlan widest_plan(std::int64_t room) const;

    /// Expected number of accepted draft tokens of 0, 1, ... `masks` masks of its prompt.
    std::vector<double> expected_of_prompt(std::int64_t masks) const { return acceptance_rates_->expected_of_prompt(masks); }

    /// A chunk of the pending tokens is final; its output is not used.
    void commit_chunk(std::int64_t num_tokens);

    /// Take the predictions of `plan`, whose pending tokens are final now if the cache block is full.
    std::optional<Accepted> commit_and_accept(const Predictions& predictions, const StepPlan& plan);

    /// Accept predictions from the left by the rule and the limits, and record how the sequence ends if it does.
    ///
    /// The first `num_draft_tokens` draft tokens were fed; they are verified or dropped. No value if nothing is accepted and the
    /// next step must run again.
    virtual std::optional<Accepted> accept(const Predictions& predictions, std::int64_t num_draft_tokens);

    /// Append what is known of the answer before any prediction, until the sequence has `most` tokens.
    virtual std::optional<Accepted> begin(std::int64_t /*most*/) { return std::nullopt; }

    /// The draft tokens of another source that may be fed.
    virtual DraftTokens filter_draft(DraftTokens others) const { return others; }

    /// Look up draft tokens in the sequence's own text if few of the current ones will probably be accepted; use them if more of them will.
    void consult_prompt_lookup(std::int64_t most);

    /// The expectations of the next step for the sequence, with `room` slots after its pending tokens.
    StepForecast forecast(std::int64_t room) const;
    Accepted finish(FinishReason reason);

    /// End the sequence with `error`. It keeps its tokens; nothing of it goes to the prefix cache.
    Accepted fail(std::exception_ptr error);

    /// From any thread: the tau from the next step on, which ends exact mode. Throws SessionError for an invalid one.
    void set_tau(double tau);

    /// From any thread: switch to exact mode from the next step on, or back to the default tau. Throws SessionError if
    /// the sequence must verify its drafts.
    void set_exact(bool exact);
    std::optional<double> tau() const;

    /// A step with this sequence begins: `interrupt` learns when another thread ends the sequence.
    void watch(std::shared_ptr<Interrupt> interrupt) {
        const std::lock_guard<std::mutex> lock(mutex_);
        interrupt_ = std::move(interrupt);
        if (told_ != untold) interrupt_->drop();
    }

    /// From any thread: end the sequence before its next step, and the running one if no other sequence needs it.
    void cancel() { end(FinishReason::cancelled); }

    /// The same because its deadline has passed. The first reason counts.
    void expire() { end(FinishReason::deadline); }

    /// Apply what other threads requested. The loop calls this between two steps, so that a step sees one setting.
    void refresh();

  protected:
    /// The sequence's own choices of tokens, drawn from the logits, from prediction `first` on, and up to the first that is not the
    /// draft token there, of the `num_draft_tokens` that were fed.
    Predictions candidates(const Predictions& predictions, std::int64_t first = 0, std::int64_t num_draft_tokens = 0) const;

    /// Make `token` part of the answer, which it may end.
    virtual void append(std::int64_t token);

    /// Count draft tokens of a step, and learn from them; forced ones do not count.
    void count_draft_tokens(std::int64_t num_fed, std::int64_t num_verified, std::vector<std::int64_t> appended);

    /// Learn what masks are worth from the probabilities of a step's masks.
    void see_masks(const std::vector<double>& probabilities);

  private:
    void advance(const std::vector<std::int64_t>& token_ids, const Predictions& predictions, std::int64_t count, std::int64_t num_verified,
                 std::int64_t num_fed);
    /// Expected number of accepted draft tokens.
    double expected_accepted(const DraftTokens& those) const;
    void end(FinishReason reason) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (told_ != untold) return;
        told_ = static_cast<int>(reason);
        if (interrupt_) interrupt_->drop();
    }

    GenerationConfig config_;
    std::vector<std::int64_t> eos_ids_;
    std::function<bool(std::int64_t)> on_token_;
    std::shared_ptr<AcceptanceRates> acceptance_rates_;
    MaskRates mask_rates_;
    std::optional<PromptLookup> prompt_lookup_;

    // Requests of other threads.
    static constexpr int untold = -1;
    std::atomic<double> wanted_;           // tau, or exact_mode
    std::atomic<int> told_{untold};        // the FinishReason to end with
    std::mutex mutex_;                     // guards changes of told_, and interrupt_
    std::shared_ptr<Interrupt> interrupt_; // of its last step
};

} // namespace mars
