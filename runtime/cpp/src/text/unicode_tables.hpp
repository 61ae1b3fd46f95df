// Unicode as in Hugging Face `tokenizers`: sorted tables that tools/unicode_tables.py generates from that library.
#pragma once

namespace mars {

/// A generated table.
template <typename Row>
struct Table {
    const Row* first;
    const Row* last;

    const Row* begin() const { return first; }
    const Row* end() const { return last; }
};

struct CodePointRange {
    char32_t low, high; // both inside
};

struct CombiningRange {
    char32_t low, high; // both inside
    unsigned char combining_class;
};

/// One step of a canonical decomposition; `second` is 0 if a code point only maps to another.
struct Decomposition {
    char32_t from, first, second;
};

extern const Table<CodePointRange> letters;    // \p{L} of the split patterns
extern const Table<CodePointRange> numbers;    // \p{N} of the split patterns
extern const Table<CodePointRange> new_digits; // digits of the Digits pre-tokenizer that are newer than `numbers`
extern const Table<CodePointRange> spaces;     // \s
extern const Table<CombiningRange> combining;  // combining classes above 0
// Decompositions by `from`, without the Hangul syllables, which are arithmetic.
extern const Table<Decomposition> pairs;   // those that normalization form C composes again
extern const Table<Decomposition> one_way; // the others

} // namespace mars
