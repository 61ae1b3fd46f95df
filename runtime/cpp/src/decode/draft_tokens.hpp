// runtime/decode/speculation/drafts.py: predicted next tokens, from masks or from a lookup.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace mars {

enum class Source { masks, prompt_lookup };

/// Tokens for the positions after a sequence's last pending one. `confidences[i]` is the source's own, 0 to 1. `forced`:
/// indices, in order, of draft tokens that are accepted whenever all before them are.
struct DraftTokens {
    std::vector<std::int64_t> token_ids;
    std::vector<double> confidences;
    Source source = Source::masks;
    std::vector<std::int64_t> forced = {};

    std::int64_t size() const { return static_cast<std::int64_t>(token_ids.size()); }

    bool is_forced(std::int64_t i) const { return std::binary_search(forced.begin(), forced.end(), i); }
    std::int64_t num_forced(std::int64_t most) const { return std::lower_bound(forced.begin(), forced.end(), most) - forced.begin(); }
};

/// Proposes what followed the last `length` tokens at their latest earlier occurrence in the prompt or answer.
class PromptLookup {
  public:
    explicit PromptLookup(std::int64_t length) : length_(length) {}

    DraftTokens propose(const std::vector<std::int64_t>& tokens, std::int64_t most) {
        const auto size = static_cast<std::int64_t>(tokens.size());
        const auto before = [&](std::int64_t end) { return std::vector(tokens.begin() + (end - length_), tokens.begin() + end); };
        // The last tokens themselves are not indexed yet, so a match is an earlier occurrence.
        for (std::int64_t end = std::max(indexed_, length_); end < size; ++end) after_[before(end)] = end;
        indexed_ = std::max(indexed_, size);
        const auto found = size >= length_ ? after_.find(before(size)) : after_.end();
        if (found == after_.end()) return {};
        const std::int64_t count = std::min({most, max_lookup, size - found->second});
        const auto at = tokens.begin() + found->second;
        return {{at, at + count}, std::vector<double>(static_cast<std::size_t>(count), lookup_confidence), Source::prompt_lookup};
    }

  private:
    static constexpr std::int64_t max_lookup = 32;   // tokens of one lookup
    static constexpr double lookup_confidence = 0.6; // of a token that followed the same tokens before; AcceptanceRates corrects it

    std::int64_t length_, indexed_ = 0;
    std::map<std::vector<std::int64_t>, std::int64_t> after_; // the position after the latest such tokens
};

} // namespace mars
