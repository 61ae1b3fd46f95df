// Rows that follow a grammar: what is accepted, what is forced, what is proposed then. The rule of runtime/decode/row.py.
#include <algorithm>
#include <numeric>

#include "accept.hpp"
#include "decode/row.hpp"
#include "structured/guide.hpp"

namespace mars {

namespace {

constexpr double least = 0.5; // chance that all proposals are verified, below which a row with a tau proposes no more

std::int64_t size_of(const std::vector<std::int64_t>& ids) { return static_cast<std::int64_t>(ids.size()); }

} // namespace

void Row::append(std::int64_t token) {
    guide->append(token);
    tokens.push_back(token);
    if (std::find(eos_ids_.begin(), eos_ids_.end(), token) != eos_ids_.end())
        finish_reason = FinishReason::eos;
    else if (stop_ && stop_(token))
        finish_reason = FinishReason::stop;
}

std::optional<Accepted> Row::begin(std::int64_t most) {
    if (!guide || guide->begun) return std::nullopt;
    guide->begun = true;
    std::vector<std::int64_t> given;
    while (!finish_reason && remaining() > 0 && num_tokens() < most) {
        const std::optional<std::int64_t> token = guide->forced();
        if (!token) break;
        append(*token);
        given.push_back(*token);
        ++stats.tokens;
        ++stats.forced;
    }
    if (!finish_reason && remaining() <= 0)
        finish_reason = FinishReason::length;
    else if (!finish_reason && guide->is_over())
        finish_reason = FinishReason::stop;
    else if (given.empty())
        return std::nullopt;
    std::vector<double> sure(given.size(), sure_of(config_.metric));
    std::vector<std::int64_t> places(given.size());
    std::iota(places.begin(), places.end(), std::int64_t{0});
    return Accepted{index, std::move(given), std::move(sure), finish_reason, 0, nullptr, std::move(places)};
}

std::optional<Accepted> Row::follow(const Predictions& predictions, std::int64_t num_proposals) {
    const std::int64_t first = num_tokens(), left = remaining(), predicted = size_of(predictions.token_ids);
    std::vector<double> confidences;
    std::vector<std::int64_t> forced;
    std::int64_t num_held = 0, i = 0;
    bool follows = true; // whether the next prediction has seen what was appended
    for (; !finish_reason && i < left; ++i) {
        std::optional<std::int64_t> token = guide->forced();
        double confidence = sure_of(config_.metric);
        const bool is_forced = token.has_value(), is_own = i == num_held; // what the model itself says, no guess
        if (!is_forced) {
            if (guide->is_over() || !follows || i >= predicted) break;
            if (!is_own && (config_.is_exact() || config_.one_token())) break;
            const std::optional<Choice> choice = guide->choose(predictions, i, config_, tokens, is_own);
            if (!choice) break;
            if (!is_own && !passes(choice->confidence, config_.bound(), config_.metric)) break;
            if (!is_own && i - num_proposals > guide->most_masks) break;
            token = choice->token;
            confidence = choice->confidence;
        }
        confidences.push_back(confidence);
        if (is_forced) forced.push_back(i);
        append(*token);
        if (i < num_proposals) {
            follows = follows && *token == proposals.token_ids[static_cast<std::size_t>(i)];
            num_held += follows ? 1 : 0;
        } else if (is_forced || !config_.needs_logits()) {
            follows = follows && i < predicted && *token == predictions.token_ids[static_cast<std::size_t>(i)];
        }
    }
    std::vector<std::int64_t> given(tokens.begin() + first, tokens.end());
    propose(predictions, given, num_held, num_proposals);
    if (guide->is_over() && !finish_reason)
        finish_reason = FinishReason::stop;
    else if (given.empty())
        return std::nullopt;
    if (!given.empty()) stats.count(size_of(given) - size_of(forced), size_of(forced));
    if (!finish_reason && remaining() <= 0) finish_reason = FinishReason::length;
    return Accepted{index, std::move(given), std::move(confidences), finish_reason, num_held, nullptr, std::move(forced)};
}

/// As `settle`, under a grammar: what was predicted behind what was `given` is led by it.
void Row::propose(const Predictions& predictions, const std::vector<std::int64_t>& given, std::int64_t num_held, std::int64_t num_fed) {
    // At least one token is always fed again: its output is where the next prediction comes from.
    cursor = std::min(cursor + num_held, num_tokens() - 1);
    const std::int64_t count = size_of(given), predicted = size_of(predictions.token_ids);
    stats.proposed += num_fed - proposals.num_sure(num_fed);
    stats.verified += num_held - proposals.num_sure(num_held);
    if (!finish_reason) hopes_->saw(proposals, num_fed, num_held);
    if (!config_.is_exact()) {
        std::vector<bool> passed;
        for (std::int64_t i = num_fed; i < predicted; ++i)
            passed.push_back(i < count || passes(predictions.confidences[static_cast<std::size_t>(i)], config_.bound(), config_.metric));
        pass_rates.saw(std::max(count - num_fed, std::int64_t{0}), passed);
    }
    proposals = {};
    if (finish_reason) return;
    Proposals guess;
    if (num_held == num_fed) {
        std::vector<double> hopes;
        for (std::int64_t i = num_fed + 1; i < predicted; ++i)
            hopes.push_back(hopes_->of(Source::masks, predictions.probabilities[static_cast<std::size_t>(i)]));
        foresight_.saw(hopes);
        // Predictions behind another token than the model's own are void, as in `settle`.
        const std::int64_t end = std::min(count, predicted);
        const bool is_own =
            count <= predicted && std::equal(given.begin() + std::min(num_fed, count), given.end(),
                                             predictions.token_ids.begin() + std::min(num_fed, end), predictions.token_ids.begin() + end);
        if (config_.needs_logits() || is_own) {
            if (config_.needs_logits())
                guess.token_ids = candidates(predictions, count).token_ids;
            else
                guess.token_ids.assign(predictions.token_ids.begin() + end, predictions.token_ids.end());
            guess.confidences.assign(predictions.probabilities.begin() + end, predictions.probabilities.end());
        }
    }
    proposals = guide->lead(guess, config_.is_exact() ? 0.0 : least);
}

} // namespace mars
