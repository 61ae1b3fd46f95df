// A talk in turns: what was said is not read again. Twin of runtime/session/conversation.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/session.hpp>

namespace mars {

/// A question and the text of its answer.
struct Turn {
    std::string question, answer;
};

/// Turns of one user and the model. `send` asks the next question, and ends an answer that still runs.
///
/// The ids of answers are kept: as long as the template renders the same text, a prompt begins with the very ids that were read and said.
/// For one thread at a time; several conversations of one session may run in several threads.
class MARS_API Conversation {
  public:
    ~Conversation();
    Conversation(Conversation&&) noexcept;
    Conversation& operator=(Conversation&&) noexcept;

    /// Ask, and stream the answer, which belongs to the conversation and is valid until its next question. Throws SessionError for what
    /// cannot be asked, and is then as it was. Where the context ends, the oldest turns go if that was allowed.
    Stream& send(const std::string& text, const GenerationConfig& config = {});

    /// Ask `text` in place of the question of `turn`, an index of `turns`, from the end below 0; all behind it is forgotten.
    Stream& edit(const std::string& text, const GenerationConfig& config = {}, std::int64_t turn = -1);

    /// Take the last turns back.
    void undo(std::int64_t turns = 1);

    /// Forget all turns; the system message stays.
    void reset();

    /// Let `messages` be what was said: a system message or none, then questions with their answers. Turns that are the same as here keep
    /// their ids. Throws SessionError for messages in another order.
    void resume(const std::vector<Message>& messages);

    /// What was said; an answer that is still being made is not among them.
    std::vector<Turn> turns();

    /// The same as chat messages, the system message first.
    std::vector<Message> messages();

    /// Turns that the last `send` let go to make room.
    std::int64_t dropped() const;

  private:
    friend class Session;
    struct State;
    Conversation(std::shared_ptr<const Opened> session, std::optional<std::string> system, bool drop_oldest);

    std::unique_ptr<State> state_;
};

} // namespace mars
