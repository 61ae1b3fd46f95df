#include "structured/grammar_state.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>

#include <mars/errors.hpp>

#include "decode/sequence.hpp"

namespace mars {

namespace {

constexpr double likely_enough = 0.6;        // share of the tried continuations, from which the grammar itself proposes a token
constexpr std::size_t max_draft_tokens = 64; // draft tokens, including what is forced between them

std::vector<std::int64_t> sorted(std::vector<std::int64_t> ids) {
    std::sort(ids.begin(), ids.end());
    return ids;
}

} // namespace

GrammarState::GrammarState(Matcher matcher, std::vector<std::int64_t> eos_ids, bool can_ask, std::int64_t num_masks)
    : max_masks(num_masks), matcher_(std::move(matcher)), eos_ids_(sorted(std::move(eos_ids))), can_ask_(can_ask) {}

bool GrammarState::ends(std::int64_t token) const { return std::binary_search(eos_ids_.begin(), eos_ids_.end(), token); }

bool GrammarState::is_over() { return queue_.empty() && eos_ids_.empty() && matcher_.is_over(); }

std::optional<std::int64_t> GrammarState::forced() {
    if (queue_.empty())
        for (const std::int64_t token : matcher_.forced()) queue_.push_back(token);
    if (!queue_.empty()) return queue_.front();
    return !eos_ids_.empty() && matcher_.is_over() ? std::optional(eos_ids_.front()) : std::nullopt;
}

void GrammarState::append(std::int64_t token) {
    if (!queue_.empty()) {
        assert(token == queue_.front() && "a forced run is appended whole");
        queue_.pop_front();
    }
    if (!ends(token)) matcher_.consume(token);
}

TokenSet GrammarState::allowed() {
    TokenSet mask = matcher_.mask();
    for (const std::int64_t token : eos_ids_) mask.set(token, matcher_.may_end());
    return mask;
}

std::optional<Choice> GrammarState::choose(const Predictions& predictions, std::int64_t i, const GenerationConfig& config,
                                           const std::vector<std::int64_t>& seen, bool strict) {
    const TokenSet mask = allowed();
    if (config.needs_logits()) {
        const float* logits = predictions.logits.data() + i * predictions.vocab_size;
        return mars::choose(logits, predictions.vocab_size, config, seen, static_cast<std::int64_t>(seen.size()), &mask);
    }
    const std::int64_t token = predictions.token_ids[static_cast<std::size_t>(i)];
    if (mask.has(token)) return Choice{token, predictions.confidences[static_cast<std::size_t>(i)]};
    return strict || i == 0 ? best(predictions, i, mask, config.metric) : std::nullopt;
}

std::optional<Choice> GrammarState::best(const Predictions& predictions, std::int64_t i, const TokenSet& allowed, Metric metric) {
    const std::int64_t k = predictions.top_k;
    for (std::int64_t at = 0; at < k; ++at) {
        const std::int64_t token = predictions.topk_ids[static_cast<std::size_t>(i * k + at)];
        if (!allowed.has(token)) continue;
        const double own = std::exp(double{predictions.topk_logprobs[static_cast<std::size_t>(i * k + at)]});
        const double top = std::exp(double{predictions.topk_logprobs[static_cast<std::size_t>(i * k)]});
        if (metric == Metric::probability) return Choice{token, own};
        return Choice{token, metric == Metric::margin ? own - top : predictions.confidences[static_cast<std::size_t>(i)]};
    }
    if (!predictions.logits.empty()) {
        const float* logits = predictions.logits.data() + i * predictions.vocab_size;
        std::int64_t token = -1;
        for (std::int64_t id = 0; id < predictions.vocab_size; ++id)
            if (allowed.has(id) && (token < 0 || logits[id] > logits[token])) token = id;
        if (token < 0) throw SessionError("the grammar allows no token of this model; make the schema, regex or tools simpler");
        return Choice{token, confidence_of(logits, predictions.vocab_size, token, metric)};
    }
    if (i == 0 && !can_ask_)
        throw SessionError(std::string("the grammar allows none of the tokens that ") + (k > 0 ? "its top-k holds" : "this bundle gives") +
                               " at this position, and there are no logits to choose from; export the bundle without --no-logits",
                           "unsupported_by_model");
    wants_logits = wants_logits || i == 0;
    return std::nullopt;
}

DraftTokens GrammarState::filter_draft(const DraftTokens& guess, double least) const {
    if (!queue_.empty()) return guess;
    Matcher matcher = matcher_;
    DraftTokens filtered{{}, {}, guess.source, {}};
    std::int64_t at = 0;
    double chance = 1.0;
    const auto add = [&](std::int64_t token, double confidence) {
        // After a different token than guessed, the rest of the guess is void.
        at = at < guess.size() && guess.token_ids[static_cast<std::size_t>(at)] == token ? at + 1 : guess.size();
        filtered.token_ids.push_back(token);
        filtered.confidences.push_back(confidence);
    };
    while (filtered.token_ids.size() < max_draft_tokens) {
        const std::vector<std::int64_t> forced = matcher.forced();
        for (const std::int64_t token : forced) {
            matcher.consume(token);
            filtered.forced.push_back(filtered.size());
            add(token, 1.0);
        }
        if (!forced.empty()) continue;
        if (matcher.is_over()) {
            if (!eos_ids_.empty()) {
                filtered.forced.push_back(filtered.size());
                add(eos_ids_.front(), 1.0);
            }
            break;
        }
        const std::optional<Choice> choice = guessed(matcher, guess, at);
        if (!choice) break;
        chance *= choice->confidence;
        if (chance < least) break;
        add(choice->token, choice->confidence);
        if (ends(choice->token)) break;
        matcher.consume(choice->token);
    }
    return filtered;
}

/// A token for a choice: the guess if it is allowed, otherwise what the grammar makes likely.
std::optional<Choice> GrammarState::guessed(Matcher& matcher, const DraftTokens& guess, std::int64_t at) const {
    if (at < guess.size()) {
        const std::int64_t token = guess.token_ids[static_cast<std::size_t>(at)];
        if (ends(token) ? matcher.may_end() : matcher.mask().has(token))
            return Choice{token, guess.confidences[static_cast<std::size_t>(at)]};
    }
    const auto likely = matcher.likely();
    return likely && likely->second >= likely_enough ? std::optional(Choice{likely->first, likely->second}) : std::nullopt;
}

} // namespace mars
