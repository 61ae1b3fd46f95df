// The alternatives of the patterns from first to last, with backtracking worked out by hand.
#include "text/pretokenize.hpp"

#include <cstddef>
#include <cstdint>

#include "text/unicode.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr std::string_view qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

class Reader {
  public:
    struct Char {
        char32_t code_point;
        std::size_t end; // offset of the next character
        CharClass kind;

        bool is(CharClass wanted) const { return kind == wanted; }
        bool is_newline() const { return code_point == '\r' || code_point == '\n'; }
    };

    explicit Reader(std::string_view text) : text_(text) {}

    bool at_end(std::size_t at) const { return at == text_.size(); }

    /// The character at `at`, which is not the end.
    Char at(std::size_t at) const {
        std::size_t end = at;
        const char32_t c = utf8::next(text_, end);
        return {c, end, class_of(c)};
    }

    /// The offset after at most `most` characters from `from` on that satisfy `wanted`.
    template <typename Wanted>
    std::size_t skip(std::size_t from, Wanted wanted, std::size_t most = SIZE_MAX) const {
        for (; most > 0 && !at_end(from); --most) {
            const Char c = at(from);
            if (!wanted(c)) break;
            from = c.end;
        }
        return from;
    }

    std::size_t skip(std::size_t from, CharClass kind, std::size_t most = SIZE_MAX) const {
        return skip(from, [kind](const Char& c) { return c.is(kind); }, most);
    }

  private:
    std::string_view text_;
};

/// The offset after `'s|'t|'re|'ve|'m|'ll|'d` at `from`, or `from`. Ignoring case, U+017F is an s too.
std::size_t contraction(const Reader& text, std::size_t from, bool any_case) {
    if (text.at(from).code_point != '\'' || text.at_end(from + 1)) return from;
    const auto folded = [any_case](char32_t c) -> char32_t {
        if (!any_case) return c;
        return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c == 0x17F ? U's' : c;
    };
    const Reader::Char first = text.at(from + 1);
    const char32_t letter = folded(first.code_point);
    if (letter == 's' || letter == 't' || letter == 'm' || letter == 'd') return first.end;
    const char32_t then = letter == 'r' || letter == 'v' ? U'e' : letter == 'l' ? U'l' : 0;
    if (then == 0 || text.at_end(first.end)) return from;
    const Reader::Char second = text.at(first.end);
    return folded(second.code_point) == then ? second.end : from;
}

/// `\s+(?!\S)|\s+` at a space: a run of several spaces leaves its last one to the following word.
std::size_t spaces(const Reader& text, std::size_t from) {
    std::size_t last = from, end = from;
    while (!text.at_end(end)) {
        const Reader::Char c = text.at(end);
        if (!c.is(CharClass::space)) return last == from ? end : last;
        last = end;
        end = c.end;
    }
    return end;
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
std::size_t gpt2_piece(const Reader& text, std::size_t from) {
    if (const std::size_t end = contraction(text, from, false); end != from) return end;
    const Reader::Char first = text.at(from);
    const std::size_t start = first.code_point == ' ' ? first.end : from;
    if (!text.at_end(start)) {
        const CharClass kind = text.at(start).kind;
        if (kind != CharClass::space) return text.skip(start, kind);
    }
    return spaces(text, from);
}

/// The patterns of Qwen2 and Llama 3, which differ in how many digits (`\p{N}`) form a piece.
std::size_t modern_piece(const Reader& text, std::size_t from, std::size_t most_digits) {
    if (const std::size_t end = contraction(text, from, true); end != from) return end;
    const Reader::Char first = text.at(from);
    if (first.is(CharClass::letter)) return text.skip(from, CharClass::letter);
    if (first.is(CharClass::number)) return text.skip(from, CharClass::number, most_digits);
    // [^\r\n\p{L}\p{N}]?\p{L}+
    if (!first.is_newline()) {
        if (const std::size_t end = text.skip(first.end, CharClass::letter); end != first.end) return end;
    }
    // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
    const std::size_t start = first.code_point == ' ' ? first.end : from;
    if (const std::size_t end = text.skip(start, CharClass::other); end != start)
        return text.skip(end, [](const Reader::Char& c) { return c.is_newline(); });
    // `\s*[\r\n]+`: up to the last newline of the run of spaces
    std::size_t newline = from;
    text.skip(from, [&](const Reader::Char& c) {
        if (c.is_newline()) newline = c.end;
        return c.is(CharClass::space);
    });
    return newline != from ? newline : spaces(text, from);
}

std::size_t digit_piece(const Reader& text, std::size_t from) {
    const auto is_none = [](const Reader::Char& c) { return !is_digit(c.code_point); };
    const std::size_t end = text.skip(from, is_none);
    return end != from ? end : text.at(from).end;
}

std::size_t piece(Split split, const Reader& text, std::size_t from) {
    switch (split) {
    case Split::digits:
        return digit_piece(text, from);
    case Split::gpt2:
        return gpt2_piece(text, from);
    case Split::qwen2:
        return modern_piece(text, from, 1);
    case Split::llama3:
        return modern_piece(text, from, 3);
    }
    return from; // not reached
}

} // namespace

std::optional<Split> split_of_pattern(std::string_view pattern) {
    if (pattern == qwen2_pattern) return Split::qwen2;
    if (pattern == llama3_pattern) return Split::llama3;
    return std::nullopt;
}

void cut(Split split, std::string_view text, std::vector<std::string_view>& pieces) {
    const Reader reader(text);
    for (std::size_t from = 0; from < text.size();) {
        const std::size_t end = piece(split, reader, from);
        pieces.push_back(text.substr(from, end - from));
        from = end;
    }
}

} // namespace mars
