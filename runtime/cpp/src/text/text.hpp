// Tokenizer and chat template of a bundle (runtime/text/tokenizer.py). The streaming part is in the public text.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/text.hpp>

#include "bundle/turns.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// Immutable and thread-safe.
class Text {
  public:
    /// `parse_special`: whether the text of a special token inside a message is that token or plain text.
    explicit Text(Tokenizer tokenizer, ChatTurns chat = {}, bool parse_special = false);
    std::vector<int64_t> encode(std::string_view prompt) const;

    /// Token ids of messages in the chat template, ready for the answer. Throws SessionError as ChatTurns::render does.
    std::vector<int64_t> encode(const std::vector<Message>& messages, std::optional<bool> thinking = std::nullopt) const;

    /// Token ids of rendered messages from byte `from` on.
    std::vector<int64_t> encode(const Rendered& prompt, std::size_t from = 0) const;
    std::string spelled(const std::vector<int64_t>& ids) const;

    /// The chat template's text for `messages` and the beginning of an answer; `thinking` as in ChatTurns::render.
    Rendered render(const std::vector<Message>& messages, std::optional<bool> thinking = std::nullopt) const;

    /// Whether `thinking` can be given.
    bool switches_thinking() const { return chat_.switches_thinking(); }
    std::string decode(const std::vector<int64_t>& ids) const;

    const Tokenizer& tokenizer() const { return tokenizer_; }

  private:
    Tokenizer tokenizer_;
    ChatTurns chat_;
    bool parse_special_;
};

} // namespace mars
