// No Python file: SentencePiece's spaces and bytes (Llama 2, Mistral): a space is U+2581, a byte <0xNN>.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "bundle/fields.hpp"

namespace mars {

/// How a tokenizer with byte fallback writes spaces.
struct Metaspace {
    /// Where a mark is added in front: nowhere; at the start of the whole text, or of each part between added tokens,
    /// unless one is there (pre-tokenizer); or before each part in any case (normalizer).
    enum class Prefix { never, first, always, normalizer };
    Prefix prefix = Prefix::never;
    bool by_normalizer = false;      ///< applied before normalized added tokens are searched, not after
    bool splits = false;             ///< a word for each mark; otherwise one word
    bool leaves_first_space = false; ///< decoding drops one space at the start of a text

    /// `text` with its spaces written as marks; `is_first`: it begins the whole text.
    std::string written(std::string_view text, bool is_first) const;

    /// Append the words of a text written this way.
    void cut(std::string_view text, std::vector<std::string_view>& words) const;
};

/// Read normalizer, pre-tokenizer and decoder of a whole `tokenizer.json` with byte fallback. Problems are added to
/// `top`.
Metaspace read_metaspace(const nlohmann::json& whole, Fields& top);

/// The token of a byte, such as <0x0A>.
std::string byte_token(unsigned byte);

/// The byte of such a token; no value for other tokens.
std::optional<char> byte_of_token(std::string_view token);

/// The text of a token, with marks as spaces.
std::string without_marks(std::string_view token);

} // namespace mars
