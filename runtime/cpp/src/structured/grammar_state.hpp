// runtime/structured/grammar_state.py: a sequence's grammar: forced and allowed tokens, and its draft tokens.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include <mars/config.hpp>

#include "decode/draft_tokens.hpp"
#include "decode/sample.hpp"
#include "structured/grammar.hpp"

namespace mars {

struct Predictions;

/// One sequence's matcher, and the forced tokens that are not appended yet.
///
/// A forced run is always appended completely before the matcher is used again, so that the answer does not depend on
/// how many tokens a step accepts. `can_ask`: whether the graph can return logits; without them, tokens are chosen from
/// its top-k only. `max_masks`: the masks that the model was trained for; predictions of further masks are proposed,
/// but never accepted by tau.
class GrammarState {
  public:
    GrammarState(Matcher matcher, std::vector<std::int64_t> eos_ids, bool can_ask, std::int64_t num_masks = 64);

    const std::int64_t max_masks;
    bool wants_logits = false; ///< set once a choice needed them; every later step then returns them

    /// Whether only the end may follow and no end-of-sequence token exists to mark it.
    bool is_over();

    /// The token that must come next, including an end-of-sequence token; no value if there is a choice.
    std::optional<std::int64_t> forced();

    /// Append `token`: the forced one if there is one, otherwise an allowed one.
    void append(std::int64_t token);

    /// The allowed tokens if none is forced, including end-of-sequence tokens.
    TokenSet allowed();

    /// The constrained model's token for the next position by prediction `i`, and the model's confidence: the likeliest
    /// allowed token, or with a temperature one drawn from the allowed ones.
    ///
    /// No value if another step is needed: prediction `i` has too little to choose from, or (if not `strict`) it is no
    /// longer what the model would predict. Throws SessionError if no step of this graph could answer.
    std::optional<Choice> choose(const Predictions& predictions, std::int64_t i, const GenerationConfig& config,
                                 const std::vector<std::int64_t>& seen, bool strict);

    /// The guess as far as the grammar allows it, with the tokens that it forces in between and after; where the guess
    /// ends, tokens that the grammar makes likely. Stops once the chance that all are verified falls below `least`.
    DraftTokens filter_draft(const DraftTokens& guess, double least = 0.0) const;

  private:
    std::optional<Choice> best(const Predictions& predictions, std::int64_t i, const TokenSet& allowed, Metric metric);
    std::optional<Choice> guessed(Matcher& matcher, const DraftTokens& guess, std::int64_t at) const;
    bool ends(std::int64_t token) const;

    Matcher matcher_;
    std::vector<std::int64_t> eos_ids_; // sorted
    bool can_ask_;
    std::deque<std::int64_t> queue_;
};

} // namespace mars
