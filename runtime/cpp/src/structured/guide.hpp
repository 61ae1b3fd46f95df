// A row's grammar at work: which token may come next, which must, what of a guess is worth feeding. Token ids only: who reads automata
// implements Matcher on a higher floor.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <mars/config.hpp>

#include "decode/proposals.hpp"
#include "decode/sample.hpp"
#include "decode/token_set.hpp"

namespace mars {

struct Predictions;

/// What a grammar says of the answer so far. Knows no end-of-sequence token: the end is a state.
class Matcher {
  public:
    virtual ~Matcher() = default;

    /// The tokens that must follow now, as the tokenizer writes them; none where there is a choice.
    virtual std::vector<std::int64_t> forced() = 0;

    /// The tokens that may follow, where nothing is forced. Throws SessionError for none.
    virtual TokenSet mask() = 0;

    /// Where nothing is forced: a token that is likely all the same, and how likely; or nothing.
    virtual std::optional<std::pair<std::int64_t, double>> likely() = 0;

    /// The answer goes on with a token that may follow. Throws SessionError for another.
    virtual void consume(std::int64_t token) = 0;

    /// The same state, to try out a continuation.
    virtual std::unique_ptr<Matcher> copy() const = 0;

    /// Whether the answer may end here, and whether nothing but the end may follow.
    virtual bool may_end() = 0;
    virtual bool is_over() = 0;
};

/// One row's matcher, and the forced tokens that are not appended yet.
///
/// A forced run is always appended whole before the matcher is asked again, so the answer does not depend on how many tokens a step
/// gives. `can_ask`: whether the graph can return logits; without, nothing but its top-k is chosen from. `most_masks`: those that the model
/// was trained for; what further ones say is proposed, and not accepted by tau.
class Guide {
  public:
    Guide(std::unique_ptr<Matcher> matcher, std::vector<std::int64_t> eos_ids, bool can_ask, std::int64_t num_masks = 64);

    const std::int64_t most_masks;
    bool begun = false;
    bool wants_logits = false; ///< once a choice needed them: from then on every step returns them

    /// Whether nothing may follow, and no token can say so.
    bool is_over();

    /// The token that must come next, an end-of-sequence token included; nothing where there is a choice.
    std::optional<std::int64_t> forced();

    /// `token` is part of the answer now: the forced one where there is one, else an allowed one.
    void append(std::int64_t token);

    /// What may follow where nothing is forced, end-of-sequence tokens included.
    TokenSet allowed();

    /// The constrained model's token for the next position, by prediction `i`, and the model's confidence: the likeliest allowed one, or
    /// with a temperature the one that is drawn among the allowed.
    ///
    /// Nothing where another step must tell: prediction `i` has too little to choose from, or (not `strict`) is no longer what the model
    /// would say. Throws SessionError where no step of this graph could.
    std::optional<Choice> choose(const Predictions& predictions, std::int64_t i, const GenerationConfig& config,
                                 const std::vector<std::int64_t>& seen, bool strict);

    /// The guess as far as the grammar allows it, with what it forces between and behind; where the guess ends, what the grammar makes
    /// likely stands in. No more once less than `least` is left of the chance that all hold.
    Proposals lead(const Proposals& guess, double least = 0.0);

  private:
    std::optional<Choice> best(const Predictions& predictions, std::int64_t i, const TokenSet& allowed, Metric metric);
    std::optional<Choice> guessed(Matcher& matcher, const Proposals& guess, std::int64_t at) const;
    bool ends(std::int64_t token) const;

    std::unique_ptr<Matcher> matcher_;
    std::vector<std::int64_t> eos_ids_; // in order
    bool can_ask_;
    std::deque<std::int64_t> queue_;
};

/// Of a token that is the only one, by the row's metric.
inline double sure_of(Metric metric) { return metric == Metric::entropy ? 0.0 : 1.0; }

} // namespace mars
