// Rows whose answers follow a grammar (runtime/structured/guided_row.py).
#pragma once

#include "decode/row.hpp"
#include "structured/guide.hpp"

namespace mars {

/// A row that appends what its grammar forces, and accepts only what its grammar allows.
class GuidedRow : public Row {
  public:
    GuidedRow(std::int64_t number, std::vector<std::int64_t> prompt, GenerationConfig config, std::vector<std::int64_t> eos_ids,
              Guide guide, std::function<bool(std::int64_t)> stop = nullptr, std::shared_ptr<AcceptanceRates> acceptance_rates = nullptr)
        : Row(number, std::move(prompt), std::move(config), std::move(eos_ids), std::move(stop), std::move(acceptance_rates)),
          guide_(std::move(guide)) {}

    bool wants_logits() const override { return Row::wants_logits() || guide_.wants_logits; }
    bool wants_topk() const override { return true; }

    /// Always: the grammar proposes forced tokens with a tau, too.
    bool feeds_proposals() const override { return true; }

    std::optional<Accepted> begin(std::int64_t most) override;
    std::optional<Accepted> accept(const Predictions& predictions, std::int64_t num_proposals) override;
    Proposals lead(Proposals others) const override { return others.size() > 0 ? guide_.lead(others) : others; }

  private:
    std::optional<Choice> choose(const Predictions& predictions, std::int64_t i, std::int64_t num_verified, std::int64_t num_proposals);
    void append(std::int64_t token);
    void propose(const Predictions& predictions, const std::vector<std::int64_t>& appended, std::int64_t num_verified,
                 std::int64_t num_proposals);
    void count(const Predictions& predictions, std::int64_t num_appended, std::int64_t num_verified, std::int64_t num_proposals);

    Guide guide_;
    bool has_begun_ = false;
};

} // namespace mars
