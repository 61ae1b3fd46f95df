// runtime/session/conversation.py: a chat whose turns share their KV entries.
#include <algorithm>

#include <mars/conversation.hpp>
#include <mars/errors.hpp>

#include "joined.hpp"
#include "session/answers.hpp"
#include "text/utf8.hpp"

namespace mars {

struct Conversation::State {
    static constexpr std::int64_t room = 4; // if old turns are dropped, an answer gets up to this part of the context

    /// The text of the conversation so far, and its token ids.
    struct Spelling {
        std::string text;
        Ids ids;
    };

    /// `spellings`: longest first; empty if the ids contain more than the text, as after a stop string.
    struct Said : Turn {
        std::vector<Spelling> spellings;
    };

    /// The last question, its prompt and its answer. The caller reads the answer, so it is kept until the next
    /// question.
    struct Asked {
        std::string question;
        Spelling prompt;
        Stream reply;
        bool is_settled = false; // whether the answer has become a turn, or was dropped
    };

    std::shared_ptr<const Opened> session;
    std::optional<std::string> system;
    bool drop_oldest;
    std::int64_t dropped = 0;
    std::vector<Said> turns;
    std::optional<Asked> asked;

    const Text& text() const { return *session->text; }
    std::string spelled(const Ids& ids) const { return text().tokenizer.decode(ids, false); }
    std::int64_t capacity() const { return session->backend->max_capacity(); }

    std::vector<Message> messages(const std::vector<Said>& said, const std::string* question = nullptr) const {
        std::vector<Message> chat;
        if (system) chat.push_back({"system", *system});
        for (const Said& turn : said) {
            chat.push_back({"user", turn.question});
            chat.push_back({"assistant", turn.answer});
        }
        if (question != nullptr) chat.push_back({"user", *question});
        return chat;
    }

    /// Text and ids of the next prompt. Known ids are reused as far as the text is unchanged.
    Spelling prompt(const std::vector<Said>& said, const std::string& question) const {
        Rendered whole = text().chat.render(messages(said, &question));
        Ids ids = text().encode(whole);
        if (said.empty()) return {std::move(whole.text), std::move(ids)};
        for (const Spelling& known : said.back().spellings) {
            if (!begins_with(whole.text, known.text)) continue;
            Ids spliced = known.ids;
            const Ids rest = text().encode(whole, known.text.size());
            spliced.insert(spliced.end(), rest.begin(), rest.end());
            // A tokenizer may treat the beginning of a text differently, so check that both ids spell the same text.
            if (spelled(spliced) == spelled(ids)) return {std::move(whole.text), std::move(spliced)};
        }
        return {std::move(whole.text), std::move(ids)};
    }

    Stream& send(std::vector<Said> said, const std::string& question, const GenerationConfig& config) {
        const std::size_t before = said.size();
        session->measure(utf8::length(question));
        Spelling spelling = prompt(said, question);
        const auto length = [&] { return static_cast<std::int64_t>(spelling.ids.size()); };
        const std::int64_t need = std::min(config.max_new_tokens, capacity() / room);
        if (drop_oldest && length() + need > capacity()) {
            // Make room for two answers: if one turn were dropped each time, the whole prompt would be read again each
            // time.
            while (!said.empty() && length() + 2 * need > capacity()) {
                said.erase(said.begin());
                spelling = prompt(said, question);
            }
        }
        if (length() > capacity()) throw SessionError(full(length(), !said.empty()));
        Stream reply(std::make_shared<Answers>(session, std::vector<Prompt>{spelling.ids}, std::vector{config}, 1, system));
        turns = std::move(said);
        dropped = static_cast<std::int64_t>(before - turns.size());
        return asked.emplace(Asked{question, std::move(spelling), std::move(reply)}).reply;
    }

    /// End the current answer and make it a turn, unless it failed or is empty.
    void settle() {
        if (!asked || std::exchange(asked->is_settled, true)) return;
        asked->reply.close();
        const Completion done = asked->reply.completion();
        if (asked->reply.failed() || done.token_ids.empty()) return;
        Said turn{{asked->question, done.text}, {}};
        const std::string written = asked->prompt.text + done.text;
        Ids ids = asked->prompt.ids;
        ids.insert(ids.end(), done.token_ids.begin(), done.token_ids.end());
        if (done.finish_reason == FinishReason::eos) {
            // The end token is in the ids but not in the text: the template writes it, or another one.
            turn.spellings = {{written + spelled({ids.back()}), ids}, {written, {ids.begin(), ids.end() - 1}}};
        } else if (done.finish_reason != FinishReason::stop) {
            turn.spellings = {{written, std::move(ids)}};
        }
        turns.push_back(std::move(turn));
    }

    std::string full(std::int64_t length, bool has_turns) const {
        const std::string holds = std::to_string(length) + " tokens" + (has_turns ? " with this question" : "") +
                                  ", this bundle's context holds " + std::to_string(capacity());
        if (!has_turns) return "the question and the system message have " + holds + "; shorten them";
        return "the conversation has " + holds + "; remove turns (undo), start over (reset), or open it with drop_oldest, which lets the" +
               " oldest turns go";
    }
};

Conversation::Conversation(std::shared_ptr<const Opened> session, std::optional<std::string> system, bool drop_oldest)
    : state_(new State{std::move(session), std::move(system), drop_oldest, 0, {}, {}}) {}

Stream& Conversation::send(const std::string& text, const GenerationConfig& config) {
    state_->settle();
    return state_->send(state_->turns, text, config);
}

Stream& Conversation::edit(const std::string& text, const GenerationConfig& config, std::int64_t turn) {
    state_->settle();
    const auto size = static_cast<std::int64_t>(state_->turns.size());
    if (turn < -size || turn >= size)
        throw SessionError("there is no turn " + std::to_string(turn) + ": the conversation has " + std::to_string(size));
    const auto begin = state_->turns.begin();
    return state_->send({begin, begin + (turn < 0 ? turn + size : turn)}, text, config);
}

void Conversation::undo(std::int64_t turns) {
    if (turns < 1) throw SessionError("turns must be 1 or more, not " + std::to_string(turns));
    state_->settle();
    const auto size = static_cast<std::int64_t>(state_->turns.size());
    state_->turns.resize(static_cast<std::size_t>(std::max(std::int64_t{0}, size - turns)));
}

void Conversation::reset() {
    state_->settle();
    state_->turns.clear();
}

void Conversation::resume(const std::vector<Message>& messages) {
    state_->settle();
    for (const Message& each : messages) state_->session->measure(utf8::length(each.content));
    const bool has_system = !messages.empty() && messages.front().role == "system";
    const std::optional<std::string> system = has_system ? std::optional(messages.front().content) : std::nullopt;
    std::vector<State::Said> said;
    bool good = (messages.size() - has_system) % 2 == 0;
    for (std::size_t i = has_system; good && i < messages.size(); i += 2) {
        good = messages[i].role == "user" && messages[i + 1].role == "assistant";
        said.push_back({{messages[i].content, messages[i + 1].content}, {}});
    }
    if (!good)
        throw SessionError(
            "a conversation must consist of questions and their answers in turn; give user and assistant messages in pairs, a"
            " system message only before them");
    // Ids stand for everything up to their turn: they are valid until the first turn that differs.
    for (std::size_t i = 0; system == state_->system && i < std::min(said.size(), state_->turns.size()); ++i) {
        const State::Said& own = state_->turns[i];
        if (own.question != said[i].question || own.answer != said[i].answer) break;
        said[i].spellings = own.spellings;
    }
    state_->system = system;
    state_->turns = std::move(said);
}

std::vector<Turn> Conversation::turns() {
    if (state_->asked && state_->asked->reply.is_over()) state_->settle();
    return {state_->turns.begin(), state_->turns.end()};
}

std::vector<Message> Conversation::messages() {
    turns();
    return state_->messages(state_->turns);
}

std::int64_t Conversation::dropped() const { return state_->dropped; }

} // namespace mars
