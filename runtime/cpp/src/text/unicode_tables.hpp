// No Python file: sorted tables of Unicode that tools/unicode_tables.py generates from `tokenizers`.
#pragma once

#include <string_view>

namespace mars {

/// A generated table.
template <typename Row>
struct Table {
    const Row* first;
    const Row* last;

    const Row* begin() const { return first; }
    const Row* end() const { return last; }
};

struct CombiningRange {
    char32_t low, high; // both inside
    unsigned char combining_class;
};

/// One step of the canonical decompositions of `from` and the code points after it: one or two characters for each.
struct Mapped {
    char32_t from;
    std::u32string_view to;
};

// Sets of code points: where ranges begin and, one further, end.
extern const Table<char32_t> letters;    // \p{L} of the split patterns
extern const Table<char32_t> numbers;    // \p{N} of the split patterns
extern const Table<char32_t> new_digits; // digits of the Digits pre-tokenizer that are newer than `numbers`
extern const Table<char32_t> spaces;     // \s

extern const Table<CombiningRange> combining; // combining classes above 0
// Decompositions without the Hangul syllables, which are arithmetic.
extern const Table<Mapped> pairs;      // two characters, which normalization form C composes again
extern const Table<Mapped> exclusions; // two characters that it does not compose
extern const Table<Mapped> singles;    // one character

} // namespace mars
