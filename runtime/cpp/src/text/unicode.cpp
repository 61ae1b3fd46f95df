// Character classes; normalization form C: decompose, order the marks, compose (Unicode standard, chapter 3.11).
#include "text/unicode.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "text/unicode_tables.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

bool contains(const Table<char32_t>& edges, char32_t code_point) {
    return (std::upper_bound(edges.begin(), edges.end(), code_point) - edges.begin()) % 2 == 1;
}

// Hangul syllables are composed by arithmetic (chapter 3.12).
constexpr char32_t lead_base = 0x1100, vowel_base = 0x1161, tail_base = 0x11A7, syllable_base = 0xAC00;
constexpr char32_t num_leads = 19, num_vowels = 21, num_tails = 28, num_syllables = num_leads * num_vowels * num_tails;

/// Code points below this one do not combine with the one before.
constexpr char32_t first_mark = 0x300;

int combining_class(char32_t c) {
    if (c < first_mark) return 0;
    const auto* after =
        std::upper_bound(combining.begin(), combining.end(), c, [](char32_t key, const CombiningRange& row) { return key < row.low; });
    return after != combining.begin() && c <= std::prev(after)->high ? std::prev(after)->combining_class : 0;
}

/// The decomposition of a code point, `width` characters; empty if it has none in this table.
std::u32string_view decomposition(const Table<Mapped>& table, std::size_t width, char32_t c) {
    const auto* after = std::upper_bound(table.begin(), table.end(), c, [](char32_t key, const Mapped& run) { return key < run.from; });
    if (after == table.begin()) return {};
    const Mapped& run = *std::prev(after);
    return run.to.substr(std::min(width * (c - run.from), run.to.size()), width);
}

void decompose(char32_t c, std::vector<char32_t>& out) {
    if (c >= syllable_base && c < syllable_base + num_syllables) {
        const char32_t index = c - syllable_base;
        out.push_back(lead_base + index / (num_vowels * num_tails));
        out.push_back(vowel_base + index / num_tails % num_vowels);
        if (index % num_tails != 0) out.push_back(tail_base + index % num_tails);
        return;
    }
    std::u32string_view parts;
    if (c >= 0xC0) parts = decomposition(pairs, 2, c);
    if (c >= 0xC0 && parts.empty()) parts = decomposition(exclusions, 2, c);
    if (c >= 0xC0 && parts.empty()) parts = decomposition(singles, 1, c);
    if (parts.empty()) return out.push_back(c);
    decompose(parts.front(), out);
    if (parts.size() > 1) out.push_back(parts.back());
}

using Pair = std::pair<char32_t, char32_t>;

/// Composites by their parts.
const std::map<Pair, char32_t>& composites() {
    static const auto table = [] {
        std::map<Pair, char32_t> all;
        for (const auto& [from, to] : pairs)
            for (std::size_t i = 0; i < to.size(); i += 2) all[{to[i], to[i + 1]}] = from + static_cast<char32_t>(i / 2);
        return all;
    }();
    return table;
}

/// The composite of two code points, or 0.
char32_t compose(char32_t first, char32_t second) {
    if (first >= lead_base && first < lead_base + num_leads && second >= vowel_base && second < vowel_base + num_vowels)
        return syllable_base + ((first - lead_base) * num_vowels + second - vowel_base) * num_tails;
    if (first >= syllable_base && first < syllable_base + num_syllables && (first - syllable_base) % num_tails == 0 && second > tail_base &&
        second < tail_base + num_tails)
        return first + second - tail_base;
    const auto composite = composites().find({first, second});
    return composite != composites().end() ? composite->second : 0;
}

struct Mark {
    char32_t code_point;
    int combining_class;
};

/// Compose in place; returns how many remain. A mark is blocked by a mark of the same or a higher class before it, or
/// by a starter.
std::size_t compose(std::vector<Mark>& text) {
    std::size_t kept = 0, starter = text.size();
    for (const Mark& mark : text) {
        const bool adjacent = starter + 1 == kept;
        const bool blocked = !adjacent && (kept == 0 || text[kept - 1].combining_class >= mark.combining_class);
        if (starter < kept && !blocked) {
            if (const char32_t composite = compose(text[starter].code_point, mark.code_point); composite != 0) {
                text[starter].code_point = composite;
                continue;
            }
        }
        if (mark.combining_class == 0) starter = kept;
        text[kept++] = mark;
    }
    return kept;
}

} // namespace

CharClass class_of(char32_t c) {
    if (c < 0x80) {
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return CharClass::letter;
        if (c >= '0' && c <= '9') return CharClass::number;
        return c == ' ' || (c >= '\t' && c <= '\r') ? CharClass::space : CharClass::other;
    }
    if (contains(letters, c)) return CharClass::letter;
    if (contains(numbers, c)) return CharClass::number;
    return contains(spaces, c) ? CharClass::space : CharClass::other;
}

bool is_digit(char32_t c) { return c < 0x80 ? c >= '0' && c <= '9' : contains(numbers, c) || contains(new_digits, c); }

std::optional<std::string> to_nfc(std::string_view text) {
    // Everything below U+0300 is in form C, and encoded below the byte 0xCC.
    if (std::all_of(text.begin(), text.end(), [](char byte) { return static_cast<unsigned char>(byte) < 0xCC; })) return std::nullopt;
    std::vector<Mark> marks;
    std::vector<char32_t> parts;
    for (std::size_t at = 0; at < text.size();) {
        parts.clear();
        decompose(utf8::next(text, at), parts);
        for (const char32_t part : parts) marks.push_back({part, combining_class(part)});
    }
    for (auto from = marks.begin(); from != marks.end();) {
        from = std::find_if(from, marks.end(), [](const Mark& m) { return m.combining_class != 0; });
        const auto to = std::find_if(from, marks.end(), [](const Mark& m) { return m.combining_class == 0; });
        std::stable_sort(from, to, [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
        from = to;
    }
    marks.resize(compose(marks));
    std::string out;
    out.reserve(text.size());
    for (const Mark& mark : marks) utf8::append(out, mark.code_point);
    return out;
}

} // namespace mars
