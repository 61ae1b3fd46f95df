// Guesses of the next tokens, to be verified by the next step: from masks, and from the row's own text.
// Knows where guesses come from and how often such guesses held; verifies nothing itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace mars {

enum class Source { masks, lookup };

/// Tokens for the positions behind a row's last known one. `confidences[i]` is the source's own, 0 to 1. `sure`: the places, in order, of
/// those that hold wherever all before them do.
struct Proposals {
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    Source source = Source::masks;
    std::vector<std::int64_t> sure = {};

    std::int64_t size() const { return static_cast<std::int64_t>(token_ids.size()); }

    bool is_sure(std::int64_t i) const { return std::binary_search(sure.begin(), sure.end(), i); }

    /// How many of the first `most` are sure.
    std::int64_t num_sure(std::int64_t most) const { return std::lower_bound(sure.begin(), sure.end(), most) - sure.begin(); }
};

/// How likely a proposal holds once all before it did: its confidence, corrected by how such ones did.
///
/// Shared by the rows of a session, so that a new row starts with what earlier rows have shown. Any thread.
class Hopes {
  public:
    /// Between 0 and 1; NaN counts as 0.
    double of(Source source, double confidence) const;

    /// Of each, once all before it held.
    std::vector<double> of_all(const Proposals& proposals) const;

    /// The first `num_held` of `num_fed` proposals held; behind the next one nothing was shown.
    void saw(const Proposals& proposals, std::int64_t num_fed, std::int64_t num_held);

  private:
    struct Count {
        double tried = 0.0, held = 0.0;
    };

    mutable std::mutex lock_;
    std::array<std::array<Count, 8>, 2> counts_{}; // by source and class of confidence
};

/// What the masks of one row are worth: for the first mask, the second, ..., how likely its proposal holds.
///
/// Every mask of every step counts, by the hope that its confidence gives: nothing waits for a verification.
class Foresight {
  public:
    /// A step's masks gave proposals of these hopes.
    void saw(const std::vector<double>& hopes);

    /// Proposals that are expected to hold of 0, 1, ... `most` masks.
    std::vector<double> expected(std::int64_t most) const;

  private:
    std::vector<double> seen_, hoped_;
};

/// Proposes what followed the last `length` tokens when they stood in the prompt or the answer before.
class Lookup {
  public:
    explicit Lookup(std::int64_t length) : length_(length) {}

    /// At most `most` proposals for what follows `tokens`.
    Proposals propose(const std::vector<std::int64_t>& tokens, std::int64_t most);

  private:
    std::int64_t length_, indexed_ = 0;
    std::map<std::vector<std::int64_t>, std::int64_t> after_; // the position behind the latest such tokens
};

} // namespace mars
