#include "decode/draft_tokens.hpp"

#include <algorithm>

namespace mars {

namespace {

constexpr std::int64_t max_lookup = 32;   // tokens of one lookup
constexpr double lookup_confidence = 0.6; // of a token that followed the same tokens before; AcceptanceRates corrects it

} // namespace

DraftTokens PromptLookup::propose(const std::vector<std::int64_t>& tokens, std::int64_t most) {
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

} // namespace mars
