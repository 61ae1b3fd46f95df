// runtime/text/tokenizer.py: tokenizer and chat template of a bundle. Streams are in the public text.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <mars/text.hpp>

#include "bundle/turns.hpp"
#include "text/tokenizer.hpp"

namespace mars {

/// Thread-safe. `parse_special`: whether the text of a special token inside a message is that token or plain text.
struct Text {
    Tokenizer tokenizer;
    ChatTurns chat = {};
    bool parse_special = false;

    std::vector<int64_t> encode(std::string_view prompt) const { return tokenizer.encode(prompt, true); }

    /// Token ids of messages in the chat template, ready for the answer. Throws SessionError as ChatTurns::render does.
    std::vector<int64_t> encode(const std::vector<Message>& messages, std::optional<bool> thinking = std::nullopt) const {
        return encode(chat.render(messages, thinking));
    }

    /// Token ids of rendered messages from byte `from` on.
    std::vector<int64_t> encode(const Rendered& prompt, std::size_t from = 0) const;
};

} // namespace mars
