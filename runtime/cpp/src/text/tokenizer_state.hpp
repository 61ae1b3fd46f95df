// What a tokenizer is made of once its file is read. Immutable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/added_tokens.hpp"
#include "text/bpe.hpp"
#include "text/metaspace.hpp"
#include "text/pretokenize.hpp"
#include "text/tokenizer.hpp"

namespace mars {

struct Tokenizer::State {
    struct Token {
        std::string bytes; // what it adds to a text; empty where the id is free
        bool is_special = false;
        bool is_byte = false; // one that byte fallback made
    };

    explicit State(Bpe merges) : bpe(std::move(merges)) {}

    Bpe bpe;
    bool nfc = false;
    std::optional<Metaspace> metaspace;      // set where characters fall back to bytes, in place of `nfc` and `splits`
    std::vector<Split> splits;               // each cuts the pieces of the one before
    AddedTokens verbatim, normalized;        // looked for before and after normalisation
    std::vector<Token> tokens;               // by id
    std::vector<std::int64_t> before, after; // special tokens around a text
};

} // namespace mars
