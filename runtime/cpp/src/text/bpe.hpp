// Byte-pair merges: the bytes of one word to token ids. Knows no text around the word.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mars {

/// Merges of two neighbouring tokens into one, lowest rank first, leftmost among equals.
class Bpe {
  public:
    /// Room for the work on one word, kept between words. One for each thread.
    struct Scratch;

    static constexpr std::int32_t no_token = -1;

    /// `byte_ids`: the token of each single byte, no_token where there is none: such bytes vanish.
    explicit Bpe(const std::array<std::int32_t, 256>& byte_ids, std::size_t num_merges = 0);

    /// Merge `left` and `right` into `merged`; the first call has the lowest rank. The last call for one pair counts.
    void add_merge(std::int32_t left, std::int32_t right, std::int32_t merged);

    /// Words that are one token whatever the merges say (`ignore_merges`).
    void add_whole(std::string word, std::int32_t id) { whole_.emplace(std::move(word), id); }

    /// Words begin as characters then, not as bytes; a character that is not added here falls back to its bytes.
    void add_character(char32_t character, std::int32_t id) { characters_.emplace(character, id); }

    /// Append the ids of `word`: raw bytes, or UTF-8 where there are characters. Takes n log n steps for n bytes.
    void encode(std::string_view word, Scratch& scratch, std::vector<std::int64_t>& ids) const;

  private:
    struct Merge {
        std::uint64_t pair; // left id in the upper half
        std::int32_t rank, merged;
    };

    template <typename Add>
    void each_symbol(std::string_view word, Add add) const;
    const Merge* find(std::int32_t left, std::int32_t right) const;
    void propose(Scratch& scratch, std::size_t left) const;

    std::array<std::int32_t, 256> byte_ids_;
    std::vector<Merge> table_; // open addressing; a power of two, never full
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
