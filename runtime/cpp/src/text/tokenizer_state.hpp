// No Python file: the immutable parts of a tokenizer after its file is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/bpe.hpp"
#include "text/metaspace.hpp"
#include "text/pretokenize.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// Finds added tokens in a text: the leftmost match, the longest of those.
///
/// A sorted list instead of a trie: each further byte narrows the range of tokens that still match.
class AddedTokens {
  public:
    struct Match {
        std::size_t start, length; // in bytes
        std::int64_t id;
    };

    AddedTokens() = default;

    /// Texts with their ids; each text once and not empty.
    explicit AddedTokens(std::vector<std::pair<std::string, std::int64_t>> tokens);

    bool empty() const { return tokens_.empty(); }

    /// The first match at or after `from`; length 0 if there is none.
    Match find(std::string_view text, std::size_t from) const;

  private:
    Match longest(std::string_view text, std::size_t start) const;

    std::vector<std::pair<std::string, std::int64_t>> tokens_; // sorted
    bool starts_[256] = {};
};

struct Tokenizer::State {
    struct Token {
        std::string bytes; // what it adds to a text; empty if the id is unused
        bool is_special = false;
        bool is_byte = false;    // created by byte fallback
        bool is_control = false; // plain text in messages
    };

    explicit State(Bpe merges) : bpe(std::move(merges)) {}

    Bpe bpe;
    bool nfc = false;
    std::optional<Metaspace> metaspace;      // set if characters fall back to bytes, instead of `nfc` and `splits`
    std::vector<Split> splits;               // each splits the pieces of the one before
    AddedTokens verbatim, normalized;        // searched before and after normalization
    std::vector<Token> tokens;               // by id
    std::vector<std::int64_t> before, after; // special tokens around a text
};

} // namespace mars
