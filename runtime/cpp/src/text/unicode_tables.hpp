// Unicode as Hugging Face `tokenizers` sees it: sorted tables that tools/unicode_tables.py reads off that library.
#pragma once

#include <cstddef>

namespace mars {

/// A table inside the library; iterates from its first row to its last.
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

/// One step of a canonical decomposition; `second` is 0 where a code point merely stands for another.
struct Decomposition {
    char32_t from, first, second;
};

struct Composition {
    char32_t first, second, to;
};

extern const Table<CodePointRange> letters;       // \p{L} of the split patterns
extern const Table<CodePointRange> numbers;       // \p{N} of the split patterns
extern const Table<CodePointRange> digits;        // what the Digits pre-tokenizer splits off, newer than `numbers`
extern const Table<CodePointRange> spaces;        // \s
extern const Table<CombiningRange> combining;     // combining classes above 0
extern const Table<Decomposition> decompositions; // by `from`; without the Hangul syllables, which are arithmetic
extern const Table<Composition> compositions;     // by `first`, then `second`; without the Hangul syllables

} // namespace mars
