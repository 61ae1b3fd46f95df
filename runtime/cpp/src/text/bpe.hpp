// No Python file: byte-pair encoding: the bytes of one word to token ids (Python: Hugging Face `tokenizers`).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mars {

/// Merges two neighbouring tokens into one, lowest rank first, leftmost among equals.
class Bpe {
  public:
    /// Working memory, reused between words. One for each thread.
    struct Scratch;

    static constexpr std::int32_t no_token = -1;

    /// `byte_ids`: the token of each single byte, or no_token; such bytes are dropped.
    explicit Bpe(const std::array<std::int32_t, 256>& byte_ids, std::size_t num_merges = 0) : byte_ids_(byte_ids) {
        merges_.reserve(num_merges);
    }

    /// Merge `left` and `right` into `merged`. The first call has the lowest rank; the last call for a pair counts.
    void add_merge(std::int32_t left, std::int32_t right, std::int32_t merged);

    /// A word that is one token whatever the merges are (`ignore_merges`).
    void add_whole(std::string word, std::int32_t id) { whole_.emplace(std::move(word), id); }

    /// Words then start from characters instead of bytes. A character not added here falls back to its bytes.
    void add_character(char32_t character, std::int32_t id) { characters_.emplace(character, id); }

    /// Append the ids of `word`: raw bytes, or UTF-8 if characters were added. Takes n log n steps for n bytes.
    void encode(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& ids) const;

  private:
    struct Merge {
        std::int32_t rank, merged;
    };

    template <typename Add>
    void each_symbol(std::string_view word, Add add) const;
    void propose(Scratch& scratch, std::size_t left) const;

    std::array<std::int32_t, 256> byte_ids_;
    std::unordered_map<std::uint64_t, Merge> merges_; // by pair, the left id in the upper half
    std::int32_t num_ranks_ = 0;
    std::unordered_map<std::string, std::int32_t> whole_;
    std::unordered_map<char32_t, std::int32_t> characters_;
};

struct Bpe::Scratch {
    struct Symbol {
        std::int32_t id;
        std::int32_t previous, next; // positions, -1 at the ends
    };
    struct Candidate {
        std::int32_t rank, position, left, right, merged;
    };

    std::vector<Symbol> symbols;
    std::vector<Candidate> queue; // a heap, least rank and position first
    std::string key;
};

} // namespace mars
