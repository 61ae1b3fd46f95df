// The immutable parts of a tokenizer after its file is read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "text/added_tokens.hpp"
#include "text/bpe.hpp"
#include "text/metaspace.hpp"
#include "text/pretokenize.hpp"
#include "text/tokenizer.hpp"

namespace mars {

struct Tokenizer::State {
    struct Token {
        std::string bytes; // what it adds to a text; empty if the id is unused
        bool is_special = false;
        bool is_byte = false; // created by byte fallback
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
