#include "structured/constrained_sequence.hpp"

#include <algorithm>
#include <numeric>

#include "accept.hpp"

namespace mars {

namespace {

constexpr double min_probability = 0.5; // a sequence with a tau makes no draft tokens that are all accepted with a lower one

std::int64_t size_of(const std::vector<std::int64_t>& ids) { return static_cast<std::int64_t>(ids.size()); }

/// Confidence of a forced token in the sequence's metric.
double certainty_of(Metric metric) { return metric == Metric::entropy ? 0.0 : 1.0; }

} // namespace

std::optional<Accepted> ConstrainedSequence::begin(std::int64_t most) {
    if (std::exchange(has_begun_, true)) return std::nullopt;
    std::vector<std::int64_t> forced;
    while (!finish_reason && remaining() > 0 && num_tokens() < most) {
        const std::optional<std::int64_t> token = grammar_state_.forced();
        if (!token) break;
        append(*token);
        forced.push_back(*token);
        ++stats.tokens;
        ++stats.forced;
    }
    if (!finish_reason && remaining() <= 0)
        finish_reason = FinishReason::length;
    else if (!finish_reason && grammar_state_.is_over())
        finish_reason = FinishReason::stop;
    else if (forced.empty())
        return std::nullopt;
    Accepted accepted{index, std::move(forced), {}, finish_reason};
    accepted.confidences.assign(accepted.token_ids.size(), certainty_of(config().metric));
    accepted.forced.resize(accepted.token_ids.size());
    std::iota(accepted.forced.begin(), accepted.forced.end(), std::int64_t{0});
    return accepted;
}

/// Append tokens from the left: what the grammar forces, else what `choose` accepts.
///
/// Prediction i is for place i of the run. It may be used as long as the model saw the tokens that were appended before
/// it: `follows`. The first `num_draft_tokens` places were fed as draft tokens; `num_verified` of them are what was appended.
std::optional<Accepted> ConstrainedSequence::accept(const Predictions& predictions, std::int64_t num_draft_tokens) {
    const std::int64_t first = num_tokens(), most = remaining(), num_predictions = size_of(predictions.token_ids);
    Accepted accepted{index, {}, {}, std::nullopt};
    bool follows = true;
    for (std::int64_t i = 0; !finish_reason && i < most; ++i) {
        std::optional<std::int64_t> token = grammar_state_.forced();
        double confidence = certainty_of(config().metric);
        const bool is_forced = token.has_value();
        if (is_forced) {
            accepted.forced.push_back(i);
        } else {
            const auto choice = follows ? choose(predictions, i, accepted.accepted_draft_tokens, num_draft_tokens) : std::nullopt;
            if (!choice) break;
            token = choice->token;
            confidence = choice->confidence;
        }
        accepted.confidences.push_back(confidence);
        append(*token);
        if (i < num_draft_tokens) {
            follows = follows && *token == draft_tokens.token_ids[static_cast<std::size_t>(i)];
            accepted.accepted_draft_tokens += follows ? 1 : 0;
        } else if (is_forced || !config().needs_logits()) {
            follows = follows && i < num_predictions && *token == predictions.token_ids[static_cast<std::size_t>(i)];
        }
    }
    accepted.token_ids.assign(tokens.begin() + first, tokens.end());
    propose(predictions, accepted.token_ids, accepted.accepted_draft_tokens, num_draft_tokens);
    if (grammar_state_.is_over() && !finish_reason)
        finish_reason = FinishReason::stop;
    else if (accepted.token_ids.empty())
        return std::nullopt;
    const std::int64_t num_forced = size_of(accepted.forced);
    if (!accepted.token_ids.empty()) stats.count(size_of(accepted.token_ids) - num_forced, num_forced);
    if (!finish_reason && remaining() <= 0) finish_reason = FinishReason::length;
    accepted.finish_reason = finish_reason;
    return accepted;
}

/// Token and confidence for place i, if the grammar leaves a choice; no value ends the run.
///
/// Prediction `num_verified` is the model's own next token. A later one is a mask's guess: exact mode takes none, a tau
/// takes the passing ones, up to the number that the model was trained for.
std::optional<Choice> ConstrainedSequence::choose(const Predictions& predictions, std::int64_t i, std::int64_t num_verified,
                                                  std::int64_t num_draft_tokens) {
    if (grammar_state_.is_over() || i >= size_of(predictions.token_ids)) return std::nullopt;
    const bool is_guess = i != num_verified;
    if (is_guess && (config().is_exact() || config().one_token())) return std::nullopt;
    const std::optional<Choice> choice = grammar_state_.choose(predictions, i, config(), tokens, !is_guess);
    if (!choice || !is_guess) return choice;
    const bool is_accepted = passes(choice->confidence, config().bound(), config().metric);
    return is_accepted && i - num_draft_tokens <= grammar_state_.max_masks ? choice : std::nullopt;
}

void ConstrainedSequence::append(std::int64_t token) {
    grammar_state_.append(token);
    Sequence::append(token);
}

/// Move the cursor past verified draft tokens, and propose what was predicted after `appended`.
void ConstrainedSequence::propose(const Predictions& predictions, const std::vector<std::int64_t>& appended, std::int64_t num_verified,
                                  std::int64_t num_draft_tokens) {
    // At least one token is fed again: its output is where the next prediction comes from.
    cursor = std::min(cursor + num_verified, num_tokens() - 1);
    const std::int64_t num_appended = size_of(appended), num_predictions = size_of(predictions.token_ids);
    count_draft_tokens(num_draft_tokens, num_verified, appended);
    if (!config().is_exact()) {
        std::vector<bool> passed;
        for (std::int64_t i = num_draft_tokens; i < num_predictions; ++i)
            passed.push_back(i < num_appended ||
                             passes(predictions.confidences[static_cast<std::size_t>(i)], config().bound(), config().metric));
        pass_rates.record(std::max(num_appended - num_draft_tokens, std::int64_t{0}), passed);
    }
    draft_tokens = {};
    if (finish_reason) return;
    DraftTokens guess;
    if (predictions.mtp_drafts > 0) {
        guess = predictions.mtp_draft(appended, num_appended, num_verified);
    } else if (num_verified == num_draft_tokens) {
        see_masks({predictions.probabilities.begin() + std::min(num_draft_tokens + 1, num_predictions), predictions.probabilities.end()});
        // Predictions after a token that is not the model's own are void.
        const bool is_own =
            num_appended <= num_predictions && std::equal(appended.begin() + std::min(num_draft_tokens, num_appended), appended.end(),
                                                          predictions.token_ids.begin() + std::min(num_draft_tokens, num_appended));
        const std::int64_t end = std::min(num_appended, num_predictions);
        if (config().needs_logits() || is_own) {
            if (config().needs_logits())
                guess.token_ids = candidates(predictions, num_appended).token_ids;
            else
                guess.token_ids.assign(predictions.token_ids.begin() + end, predictions.token_ids.end());
            guess.confidences.assign(predictions.probabilities.begin() + end, predictions.probabilities.end());
        }
    }
    draft_tokens = grammar_state_.filter_draft(guess, config().is_exact() ? 0.0 : min_probability);
}

} // namespace mars
