// Streaming text: whole characters only, and nothing that a stop string may still swallow.
#include "text/text.hpp"

#include <algorithm>
#include <utility>

#include <mars/errors.hpp>

#include "headroom.hpp"
#include "utf8.hpp"

namespace mars {

Text::Text(Tokenizer tokenizer, ChatTurns chat) : tokenizer_(std::move(tokenizer)), chat_(std::move(chat)) {}

namespace {

constexpr std::int64_t cost = 64; // bytes for each byte of a text: 46 were measured

std::vector<std::int64_t> weighed(const Tokenizer& tokenizer, std::string_view text, bool add_special_tokens) {
    const auto num_bytes = static_cast<std::int64_t>(std::min<std::size_t>(text.size(), std::size_t{1} << 50));
    const auto grant = Headroom().grant({cost * num_bytes, "a prompt of " + std::to_string(num_bytes) + " bytes", "shorten it"});
    return tokenizer.encode(text, add_special_tokens);
}

} // namespace

std::vector<std::int64_t> Text::encode(std::string_view prompt) const { return weighed(tokenizer_, prompt, true); }

std::vector<std::int64_t> Text::encode(const std::vector<Message>& messages) const { return weighed(tokenizer_, render(messages), false); }

std::vector<std::int64_t> Text::encode_part(std::string_view text) const { return weighed(tokenizer_, text, false); }

std::string Text::spelled(const std::vector<std::int64_t>& ids) const { return tokenizer_.decode(ids.data(), ids.size(), false); }

std::string Text::render(const std::vector<Message>& messages) const { return chat_.render(messages); }

std::string Text::decode(const std::vector<std::int64_t>& ids) const { return tokenizer_.decode(ids.data(), ids.size()); }

TextStream::TextStream(const Text& text, std::vector<std::string> stop)
    : tokenizer_(std::make_shared<const Tokenizer>(text.tokenizer())), stop_(std::move(stop)) {
    for (const std::string& word : stop_) {
        if (word.empty() || !utf8::is_valid(word)) throw SessionError("stop strings must be non-empty UTF-8");
        longest_stop_ = std::max(longest_stop_, word.size());
    }
}

bool TextStream::push(std::int64_t token) {
    pending_.push_back(token);
    const std::string piece = tokenizer_->decode(pending_.data(), pending_.size(), true, text_.empty());
    if (!piece.empty() && !utf8::ends_broken(piece)) {
        append(piece);
        pending_.clear();
    }
    return stopped_;
}

std::string TextStream::read() { return up_to(text_.size() - (stopped_ ? 0 : held_back())); }

std::string TextStream::finish() {
    if (!stopped_) {
        append(tokenizer_->decode(pending_.data(), pending_.size(), true, text_.empty()));
        pending_.clear();
    }
    return up_to(text_.size());
}

void TextStream::append(std::string_view piece) {
    // Whole characters on both sides, so that bytes match where characters do.
    const std::size_t start = text_.size() + 1 > longest_stop_ ? text_.size() + 1 - longest_stop_ : 0;
    text_ += piece;
    std::size_t first = std::string::npos;
    for (const std::string& word : stop_) first = std::min(first, text_.find(word, start));
    if (first != std::string::npos) {
        text_.resize(first);
        stopped_ = true;
    }
}

std::size_t TextStream::held_back() const {
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
