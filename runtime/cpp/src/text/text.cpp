#include "text/text.hpp"

#include <algorithm>
#include <utility>

#include <mars/errors.hpp>

#include "text/utf8.hpp"

namespace mars {

namespace {

constexpr std::size_t max_stop_strings = 16;
constexpr std::int64_t longest_stop = 256; // characters
// Tokens whose text is not known; the first and the last of them, which decide about later ones; and the characters that
// later bytes may still change.
constexpr std::size_t max_unread = 48;
constexpr std::ptrdiff_t first_unread = 4, last_unread = 16;
constexpr std::int64_t open_characters = 3;

/// The size of `text` without its last `count` characters.
std::size_t size_without(std::string_view text, std::int64_t count) {
    std::size_t size = text.size();
    while (count > 0)
        if ((static_cast<unsigned char>(text[--size]) & 0xC0U) != 0x80U) --count;
    return size;
}

} // namespace

std::vector<std::int64_t> Text::encode(const Rendered& prompt, std::size_t from) const {
    Spans plain;
    for (const auto& [begin, end] : prompt.contents)
        if (!parse_special && end > from) plain.emplace_back(std::max(begin, from) - from, end - from);
    return tokenizer.encode(std::string_view(prompt.text).substr(from), false, plain);
}

TextStream::TextStream(const Text& text, std::vector<std::string> stop, std::optional<ThinkingStream> thinking)
    : tokenizer_(std::make_shared<const Tokenizer>(text.tokenizer)), stop_(std::move(stop)), thinking_(std::move(thinking)) {
    if (stop_.empty()) thinking_.reset();
    std::int64_t characters = 0;
    for (const std::string& word : stop_) {
        if (word.empty() || !utf8::is_valid(word)) throw SessionError("stop strings must be non-empty UTF-8", "invalid_value", "stop");
        longest_stop_ = std::max(longest_stop_, word.size());
        characters = std::max(characters, utf8::length(word));
    }
    if (stop_.size() > max_stop_strings || characters > longest_stop)
        throw SessionError("at most " + std::to_string(max_stop_strings) + " stop strings of at most " + std::to_string(longest_stop) +
                               " characters are allowed, not " + std::to_string(stop_.size()) + " of up to " + std::to_string(characters) +
                               "; give fewer or shorter ones",
                           "invalid_value", "stop");
}

bool TextStream::push(std::int64_t token) {
    pending_.push_back(token);
    const std::string whole = tokenizer_->decode(pending_, true, text_.empty());
    if (whole.size() > known_ && !utf8::ends_broken(whole)) {
        append(std::string_view(whole).substr(known_));
        pending_.clear();
        known_ = 0;
    } else if (pending_.size() >= max_unread) {
        // No character has that many bytes: all but the last of them never become one.
        const std::string_view all = whole;
        const std::int64_t num_open = std::min(open_characters, utf8::length(all.substr(known_)));
        append(all.substr(known_, size_without(all, num_open) - known_));
        pending_.erase(pending_.begin() + first_unread, pending_.end() - last_unread);
        known_ = size_without(tokenizer_->decode(pending_, true, text_.empty()), num_open);
    }
    return stopped_;
}

std::string TextStream::read() { return up_to(text_.size() - (stopped_ ? 0 : held_back())); }

std::string TextStream::finish() {
    if (!stopped_) {
        append(tokenizer_->decode(pending_, true, text_.empty()).substr(known_));
        pending_.clear();
        known_ = 0;
    }
    return up_to(text_.size());
}

void TextStream::append(std::string_view piece) {
    // Both are whole characters, so comparing bytes is enough.
    text_ += piece;
    std::size_t start = searched_ + 1 > longest_stop_ ? searched_ + 1 - longest_stop_ : 0;
    if (thinking_) {
        thinking_->push(piece);
        if (!thinking_->is_over()) return;
        start = std::max(start, thinking_->size());
    }
    searched_ = text_.size();
    std::size_t first = std::string::npos;
    for (const std::string& word : stop_) first = std::min(first, text_.find(word, start));
    if (first != std::string::npos) {
        text_.resize(first);
        stopped_ = true;
    }
}

std::size_t TextStream::held_back() const {
    if (thinking_ && thinking_->is_undecided()) return text_.size();
    for (std::size_t length = std::min(std::max<std::size_t>(longest_stop_, 1) - 1, text_.size()); length > 0; --length) {
        const std::string_view tail = std::string_view(text_).substr(text_.size() - length);
        if (std::any_of(stop_.begin(), stop_.end(), [&](const std::string& word) { return word.compare(0, length, tail) == 0; }))
            return length;
    }
    return 0;
}

std::string TextStream::up_to(std::size_t end) {
    const std::size_t shown = shown_;
    shown_ = std::max(shown_, end);
    return text_.substr(shown, shown_ - shown);
}

} // namespace mars
