// runtime/bundle/turns.py: chat messages to prompt text, with the turns that the exporter derived from the template.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mars/text.hpp>

namespace mars {

/// Ranges of a text: [begin, end) in bytes, sorted and without overlaps.
using Spans = std::vector<std::pair<std::size_t, std::size_t>>;

/// A prompt's text, and where the messages' contents are in it.
struct Rendered {
    std::string text;
    Spans contents;
};

/// The manifest's `text.chat`: the texts between the contents of a conversation (docs/format.md).
class ChatTurns {
  public:
    /// Refuses everything: for bundles without a template, or with one that needs jinja2.
    ChatTurns() = default;

    /// Read the JSON of `text.chat`, "null" included; `where` is its name in messages. Throws BundleError.
    static ChatTurns from_json(std::string_view chat_json, std::string_view where = "manifest.json.text.chat");
    bool is_usable() const { return !between_.empty(); }

    /// The text after the last message, by its role, with `enable_thinking` true and false; no value if it is not known.
    std::optional<std::map<std::string, std::string>> on, off;

    /// Whether `render` can be asked for `thinking`.
    bool switches_thinking() const { return is_usable() && on && off; }

    /// The prompt of `messages`, up to the beginning of an answer; `thinking`: `enable_thinking`, no value for the
    /// template's own choice. Throws SessionError for conversations that need the jinja2 template itself.
    Rendered render(const std::vector<Message>& messages, std::optional<bool> thinking = std::nullopt) const;

  private:
    std::map<std::string, std::map<std::string, std::string>> between_;
    std::map<std::string, std::string> after_;
    std::vector<std::string> trimmed_;
    std::vector<std::string> reserved_;
};

} // namespace mars
