// A sorted list instead of a trie: each further byte narrows the range of tokens that still match.
#include "text/added_tokens.hpp"

#include <algorithm>

namespace mars {

AddedTokens::AddedTokens(std::vector<std::pair<std::string, std::int64_t>> tokens) : tokens_(std::move(tokens)) {
    std::sort(tokens_.begin(), tokens_.end());
    for (const auto& [text, id] : tokens_) starts_[static_cast<unsigned char>(text[0])] = true;
}

AddedTokens::Match AddedTokens::find(std::string_view text, std::size_t from) const {
    for (std::size_t start = from; start < text.size(); ++start) {
        if (!starts_[static_cast<unsigned char>(text[start])]) continue;
        if (const Match match = longest(text, start); match.length != 0) return match;
    }
    return {text.size(), 0, 0};
}

AddedTokens::Match AddedTokens::longest(std::string_view text, std::size_t start) const {
    Match match{start, 0, 0};
    auto low = tokens_.begin(), high = tokens_.end();
    for (std::size_t depth = 0; start + depth < text.size() && low != high; ++depth) {
        // All of [low, high) share their first `depth` bytes; a token that ends here sorts before longer ones.
        const auto byte = static_cast<unsigned char>(text[start + depth]);
        const auto at = [depth](const auto& token) {
            return token.first.size() <= depth ? -1 : static_cast<unsigned char>(token.first[depth]);
        };
        low = std::partition_point(low, high, [&](const auto& token) { return at(token) < byte; });
        high = std::partition_point(low, high, [&](const auto& token) { return at(token) <= byte; });
        if (low != high && low->first.size() == depth + 1) match = {start, depth + 1, low->second};
    }
    return match;
}

} // namespace mars
