// runtime/structured/vocabulary.py: a tokenizer's tokens as bytes, sorted for grammars.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer.hpp"

namespace mars {

/// Special tokens have no bytes, because text may not contain them. Immutable.
class Vocabulary {
  public:
    Vocabulary(Tokenizer tokenizer, std::int64_t vocab_size);

    std::string_view text(std::int64_t token) const {
        return token >= 0 && token < size() ? std::string_view(texts_[static_cast<std::size_t>(token)]) : std::string_view();
    }
    std::int64_t size() const { return static_cast<std::int64_t>(texts_.size()); }

    /// Tokens of `data` as the tokenizer writes it inside a text; invalid UTF-8 by the longest tokens.
    std::vector<std::int64_t> write(std::string_view data) const;

    /// The tokens that `data` begins with, the longest first.
    std::vector<std::int64_t> beginnings(std::string_view data) const;

    std::size_t longest = 0;             ///< bytes of the longest token
    std::vector<std::int64_t> sorted;    ///< tokens with bytes, sorted by them
    std::vector<std::uint32_t> alike;    ///< how many bytes each of them shares with the previous one
    std::vector<std::int64_t> by_length; ///< all tokens by their first byte, short ones first

  private:
    void greedy(std::string_view data, std::vector<std::int64_t>& ids) const;

    Tokenizer tokenizer_;
    std::vector<std::string> texts_;
    std::unordered_map<std::string_view, std::int64_t> first_; // the first token with each text
};

} // namespace mars
