// Tokenizer and chat template together. Twin of runtime/text/tokenizer.py; the public text.hpp has what streams.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mars/text.hpp>

#include "bundle/turns.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// The tokenizer and chat template of a bundle. Immutable; any number of threads may use one.
class Text {
  public:
    /// `parse_special`: whether a special token's text inside a message is that token, as it is in a text, or plain text.
    explicit Text(Tokenizer tokenizer, ChatTurns chat = {}, bool parse_special = false);

    /// Token ids of a text as it stands.
    std::vector<int64_t> encode(std::string_view prompt) const;

    /// Token ids of messages in the chat template, ready for the answer. Raises SessionError as ChatTurns::render does.
    std::vector<int64_t> encode(const std::vector<Message>& messages) const;

    /// Token ids of rendered messages from byte `from` on.
    std::vector<int64_t> encode(const Rendered& prompt, std::size_t from = 0) const;

    /// The text of ids with their special tokens written out.
    std::string spelled(const std::vector<int64_t>& ids) const;

    /// The chat template's text for `messages` and the beginning of an answer.
    Rendered render(const std::vector<Message>& messages) const;

    /// The text of token ids, special tokens left out.
    std::string decode(const std::vector<int64_t>& ids) const;

    const Tokenizer& tokenizer() const { return tokenizer_; }

  private:
    Tokenizer tokenizer_;
    ChatTurns chat_;
    bool parse_special_;
};

} // namespace mars
