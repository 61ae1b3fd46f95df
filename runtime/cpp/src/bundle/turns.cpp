// A table of texts: what stands before a content depends only on its role and the role before it.
#include "bundle/turns.hpp"

#include <algorithm>

#include <mars/errors.hpp>

#include "bundle/fields.hpp"
#include "joined.hpp"
#include "text/utf8.hpp"

namespace mars {

namespace {

using Texts = std::map<std::string, std::string>;

const std::string start = "start"; // stands for the role before the first message

[[noreturn]] void refuse(const std::string& what) {
    throw SessionError(what + "; render the prompt with the jinja2 template yourself and pass it as one text");
}

} // namespace

ChatTurns ChatTurns::from_json(std::string_view chat_json, std::string_view where) {
    const nlohmann::json value = parse_json(chat_json, std::string(where));
    ChatTurns chat;
    if (value.is_null()) return chat;
    std::vector<std::string> problems;
    Fields fields(&value, std::string(where), problems);
    Fields between = fields.object("between");
    for (const std::string& role : between.names()) chat.between_[role] = between.named_texts(role);
    chat.after_ = fields.named_texts("after");
    chat.trimmed_ = fields.texts("trimmed");
    chat.reserved_ = fields.texts("reserved");
    if (chat.between_.count(start) == 0 || chat.after_.empty())
        fields.wrong("", "a text at the start and one after the last message are needed");
    if (!problems.empty()) fail(problems, "chat template", "export the bundle again");
    return chat;
}

Rendered ChatTurns::render(const std::vector<Message>& messages, std::optional<bool> thinking) const {
    if (!is_usable()) refuse("this bundle has no chat template, or one that needs jinja2");
    if (messages.empty()) throw SessionError("messages must be a non-empty list of {role, content}");
    Rendered prompt;
    const std::string* previous = &start;
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const auto& [role, content] = messages[i];
        if (!utf8::is_valid(content)) throw SessionError("message " + std::to_string(i) + " is not valid UTF-8; pass UTF-8");
        const auto from = between_.find(*previous);
        const auto opening = from == between_.end() ? Texts::const_iterator() : from->second.find(role);
        if (from == between_.end() || opening == from->second.end())
            refuse("the chat template has no place for role `" + role.substr(0, 60) + "` after " +
                   (i == 0 ? "the start" : "`" + *previous + "`"));
        for (const std::string& word : reserved_)
            if (content.find(word) != std::string::npos)
                refuse("the chat template treats `" + word + "` inside message " + std::to_string(i) + " in its own way");
        prompt.text += opening->second;
        const std::size_t begin = prompt.text.size();
        prompt.text += std::count(trimmed_.begin(), trimmed_.end(), role) > 0 ? utf8::stripped(content) : std::string_view(content);
        if (prompt.text.size() > begin) prompt.contents.emplace_back(begin, prompt.text.size());
        previous = &role;
    }
    if (thinking && !switches_thinking()) refuse("this bundle cannot switch thinking without its chat template");
    const Texts& after = !thinking ? after_ : *thinking ? *on : *off;
    const auto last = after.find(*previous);
    if (last == after.end())
        refuse("a conversation cannot end in role `" + *previous + "` (it can in: " + joined(after, ", ", &Texts::value_type::first) + ")");
    prompt.text += last->second;
    return prompt;
}

} // namespace mars
