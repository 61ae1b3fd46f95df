// runtime/structured/constrained_sequence.py: sequences whose answers follow a grammar.
#pragma once

#include "decode/sequence.hpp"
#include "structured/grammar_state.hpp"

namespace mars {

/// A sequence that appends what its grammar forces, and accepts only what its grammar allows.
class ConstrainedSequence : public Sequence {
  public:
    ConstrainedSequence(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
                        GrammarState grammar_state, std::function<bool(std::int64_t)> on_token = nullptr,
                        std::shared_ptr<AcceptanceRates> acceptance_rates = nullptr)
        : Sequence(number, std::move(prompt), std::move(config), std::move(eos_ids), std::move(on_token), std::move(acceptance_rates)),
          grammar_state_(std::move(grammar_state)) {}

    bool wants_logits() const override { return Sequence::wants_logits() || grammar_state_.wants_logits; }
    bool wants_topk() const override { return true; }

    /// Always: the grammar proposes forced tokens with a tau, too.
    bool feeds_draft_tokens() const override { return true; }

    std::optional<Accepted> begin(std::int64_t most) override;
    std::optional<Accepted> accept(const Predictions& predictions, std::int64_t num_draft_tokens) override;
    DraftTokens filter_draft(DraftTokens others) const override { return others.size() > 0 ? grammar_state_.filter_draft(others) : others; }

  private:
    std::optional<Choice> choose(const Predictions& predictions, std::int64_t i, std::int64_t num_verified, std::int64_t num_draft_tokens);
    void append(std::int64_t token) override;
    void propose(const Predictions& predictions, const std::vector<std::int64_t>& appended, std::int64_t num_verified,
                 std::int64_t num_draft_tokens);

    GrammarState grammar_state_;
    bool has_begun_ = false;
};

} // namespace mars
