// Text in, text out: tokenizer and chat template together, streaming, stop strings. Twin of runtime/text.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mars/tokenizer.hpp>
#include <mars/turns.hpp>

namespace mars {

/// The tokenizer and chat template of a bundle. Immutable; any number of threads may use one.
class MARS_API Text {
  public:
    explicit Text(Tokenizer tokenizer, ChatTurns chat = {});

    /// Token ids of a text as it stands.
    std::vector<int64_t> encode(std::string_view prompt) const;

    /// Token ids of messages in the chat template, ready for the answer. Raises SessionError as ChatTurns::render does.
    std::vector<int64_t> encode(const std::vector<Message>& messages) const;

    /// Token ids of what goes on with a rendered prompt.
    std::vector<int64_t> encode_part(std::string_view text) const;

    /// The text of ids with their special tokens written out.
    std::string spelled(const std::vector<int64_t>& ids) const;

    /// The chat template's text for `messages` and the beginning of an answer.
    std::string render(const std::vector<Message>& messages) const;

    /// The text of token ids, special tokens left out.
    std::string decode(const std::vector<int64_t>& ids) const;

    const Tokenizer& tokenizer() const { return tokenizer_; }

  private:
    Tokenizer tokenizer_;
    ChatTurns chat_;
};

/// The growing text of one answer. Never shows half a character, nor text that may turn out to be a stop string.
/// One thread at a time.
class MARS_API TextStream {
  public:
    /// Raises SessionError when a stop string is empty or not valid UTF-8.
    explicit TextStream(const Text& text, std::vector<std::string> stop = {});

    /// Add a token; returns whether it completes a stop string, which ends the text before that string.
    bool push(int64_t token);

    /// The text that became certain since the last call.
    std::string read();

    /// All text not shown yet; an unfinished character becomes U+FFFD.
    std::string finish();

    /// Everything so far, held-back text included, without the stop string.
    const std::string& text() const { return text_; }

    bool stopped() const { return stopped_; }

  private:
    void append(std::string_view piece);
    size_t held_back() const;
    std::string up_to(size_t end);

    Tokenizer tokenizer_;
    std::vector<std::string> stop_;
    size_t longest_stop_ = 0;
    std::vector<int64_t> pending_; // tokens that do not end in a whole character yet
    std::string text_;
    size_t shown_ = 0;
    bool stopped_ = false;
};

} // namespace mars
