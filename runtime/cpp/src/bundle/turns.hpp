// Chat messages to one prompt text, from the turns that the exporter derived from the jinja2 template. Knows no tokens.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <mars/text.hpp>

#include "spans.hpp"

namespace mars {

/// A prompt's text, and where the contents of messages are in it.
struct Rendered {
    std::string text;
    Spans contents;
};

/// The manifest's `text.chat`: what stands between the contents of a conversation (docs/format.md).
class ChatTurns {
  public:
    /// A template that refuses everything: the bundle has none, or one that needs jinja2 itself.
    ChatTurns() = default;

    /// Read the JSON of `text.chat`, "null" included; `where` is what error messages call it. Raises BundleError.
    static ChatTurns from_json(std::string_view chat_json, std::string_view where = "manifest.json.text.chat");

    /// Whether `render` can do anything at all.
    bool is_usable() const { return !between_.empty(); }

    /// The prompt of `messages` and the beginning of an answer.
    /// Raises SessionError for conversations whose text only the jinja2 template itself could tell.
    Rendered render(const std::vector<Message>& messages) const;

  private:
    std::map<std::string, std::map<std::string, std::string>> between_;
    std::map<std::string, std::string> after_;
    std::vector<std::string> trimmed_;
    std::vector<std::string> reserved_;
};

} // namespace mars
