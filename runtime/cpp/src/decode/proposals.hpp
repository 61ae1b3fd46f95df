// Proposals for the next tokens, from masks and from the row's own text, and how likely they are to be verified.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace mars {

enum class Source { masks, lookup };

/// Tokens for the positions after a row's last pending one. `confidences[i]` is the source's own, 0 to 1. `sure`:
/// indices, in order, of proposals that are verified whenever all before them are.
struct Proposals {
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    Source source = Source::masks;
    std::vector<std::int64_t> sure = {};

    std::int64_t size() const { return static_cast<std::int64_t>(token_ids.size()); }

    bool is_sure(std::int64_t i) const { return std::binary_search(sure.begin(), sure.end(), i); }
    std::int64_t num_sure(std::int64_t most) const { return std::lower_bound(sure.begin(), sure.end(), most) - sure.begin(); }
};

/// How likely a proposal is verified if all before it are: its confidence, corrected by how such proposals did.
///
/// Shared by the rows of a session, so that a new row starts with what earlier rows have shown. Thread-safe.
class Hopes {
  public:
    /// 0 to 1; NaN counts as 0.
    double of(Source source, double confidence) const;

    /// For each proposal, if all before it are verified.
    std::vector<double> of_all(const Proposals& proposals) const;

    /// Record that the first `num_held` of `num_fed` proposals were verified. Nothing is known about proposals after
    /// the next one.
    void saw(const Proposals& proposals, std::int64_t num_fed, std::int64_t num_held);

  private:
    struct Count {
        double tried = 0.0, held = 0.0;
    };

    mutable std::mutex lock_;
    std::array<std::array<Count, 8>, 2> counts_{}; // by source and class of confidence
};

/// What the masks of one row are worth: how likely the proposal of the first mask, the second, ... is verified.
///
/// Every mask of every step counts, with the hope that its confidence gives, without waiting for verification.
class Foresight {
  public:
    /// Record the hopes of the proposals that a step's masks gave.
    void saw(const std::vector<double>& hopes);

    /// Expected number of verified proposals of 0, 1, ... `most` masks.
    std::vector<double> expected(std::int64_t most) const;

  private:
    std::vector<double> seen_, hoped_;
};

/// Proposes what followed the last `length` tokens at their latest earlier occurrence in the prompt or answer.
class Lookup {
  public:
    explicit Lookup(std::int64_t length) : length_(length) {}
    Proposals propose(const std::vector<std::int64_t>& tokens, std::int64_t most);

  private:
    std::int64_t length_, indexed_ = 0;
    std::map<std::vector<std::int64_t>, std::int64_t> after_; // the position after the latest such tokens
};

} // namespace mars
