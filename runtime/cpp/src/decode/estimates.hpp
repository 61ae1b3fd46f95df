// runtime/decode/speculation/drafts.py: estimates of what a step will accept, from earlier steps.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "decode/draft_tokens.hpp"

namespace mars {

/// `first` plus the expected length of the run of successes in the first 0, 1, ... of `probabilities`.
std::vector<double> expected_run(const std::vector<double>& probabilities, double first = 0.0);

/// How likely the predictions of a sequence's first mask, second mask, ... are right if those before are.
///
/// An observation fades with newer ones of the same mask, not with time, so that a mask that is not fed is not forgotten.
/// The mean over all masks counts as the first observation of each mask, and fades like others.
class MaskRates {
  public:
    explicit MaskRates(double keep = 0.75) : keep_(keep) {} ///< weight of an older observation after a newer one

    /// A step's masks: the probability that each prediction is right, or 0 or 1 if that is known.
    void record(const std::vector<double>& values);

    /// The mean of each of that many masks.
    std::vector<double> rates(std::int64_t masks) const;

    /// Expected number of right predictions, up to the first wrong one, of 0, 1, ... `masks` masks.
    std::vector<double> expected(std::int64_t masks) const { return expected_run(rates(masks)); }

  private:
    double keep_;
    std::vector<double> weights_, sums_;
};

/// How often the prediction of the next token and those of the masks passed tau.
///
/// Predictions after the first that did not pass count too, so that one all masks shows whether the model can predict
/// this text.
class PassRates {
  public:
    /// Record a step that accepted `accepted` tokens and was ended by tau alone; `passed[k]`: whether prediction k
    /// passed.
    void record(std::int64_t accepted, const std::vector<bool>& passed);

    /// Expected accepted tokens of a step with 0, 1, ... `masks` masks; each at least 1, never decreasing.
    std::vector<double> expected(std::int64_t masks) const;

    /// How often the prediction of the next token passed. A mask sees less context and will hardly do better.
    double certainty() const { return (passed_ + 1.0) / (tried_ + 1.0); }

  private:
    double tried_ = 0.0, passed_ = 0.0; // of the next token
    MaskRates masks_{0.98};
    std::vector<bool> last_passed_; // of the last step, from the next step's first mask on
};

/// The acceptance probability of a draft token, if all before it are accepted: its confidence, moved by each outcome of an
/// earlier draft token of similar confidence a share of the way to 0 or 1.
///
/// The first draft token that was not fed has an outcome too, because the step gives the token of its position. Shared by the
/// sequences of a session: a new one starts with what is known. Thread-safe.
class AcceptanceRates {
  public:
    /// 0 to 1; NaN counts as 0.
    double probability(Source source, double confidence) const;

    /// The acceptance probability of each draft token.
    std::vector<double> probabilities(const DraftTokens& draft_tokens) const;

    /// The text has `token_ids` in place of `draft_tokens`, fed or not; up to the first that differs.
    void record(const DraftTokens& draft_tokens, const std::vector<std::int64_t>& token_ids);

    /// The acceptance probabilities of a prompt's masks, at least one.
    void record_prompt(const std::vector<double>& probabilities);

    /// Expected number of accepted draft tokens of 0, 1, ... `masks` masks of a prompt: the mean over the last prompts, which may
    /// be of several kinds of text, as if each had one acceptance probability.
    std::vector<double> expected_of_prompt(std::int64_t masks) const;

  private:
    struct Estimate {
        double weight = 1.0, accepted = 0.0; // what is left of the confidence, and the sum of the outcomes
    };

    mutable std::mutex lock_;
    std::array<std::array<Estimate, 8>, 2> estimates_{}; // by source and class of confidence
    std::vector<double> prompts_{1.0};                   // the mean acceptance probability of the masks of each of the last prompts
};

} // namespace mars
