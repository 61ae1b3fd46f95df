// The tokens of a tokenizer as bytes: which begin alike, and how bytes are written. Knows no grammar.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer.hpp"

namespace mars {

/// Special tokens have no bytes, as nothing that is written may hold them. Immutable.
class Vocabulary {
  public:
    Vocabulary(Tokenizer tokenizer, std::int64_t vocab_size);

    std::string_view text(std::int64_t token) const {
        return token >= 0 && token < size() ? std::string_view(texts_[static_cast<std::size_t>(token)]) : std::string_view();
    }
    std::int64_t size() const { return static_cast<std::int64_t>(texts_.size()); }

    /// As the tokenizer writes it within a text; what is no UTF-8 by the longest tokens.
    std::vector<std::int64_t> write(std::string_view data) const;

    /// The tokens that `data` may begin with, the longest first.
    std::vector<std::int64_t> beginnings(std::string_view data) const;

    std::size_t longest = 0;             ///< bytes of a token
    std::vector<std::int64_t> sorted;    ///< tokens with bytes, in the order of these
    std::vector<std::uint32_t> alike;    ///< how many bytes each of them shares with the one before
    std::vector<std::int64_t> by_length; ///< all tokens, by their first bytes, short ones first

  private:
    void greedy(std::string_view data, std::vector<std::int64_t>& ids) const;

    Tokenizer tokenizer_;
    std::vector<std::string> texts_;
    std::unordered_map<std::string_view, std::int64_t> first_; // the first token of each text
};

} // namespace mars
