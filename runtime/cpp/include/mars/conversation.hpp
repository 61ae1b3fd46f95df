// Conversations: earlier turns are not read again (runtime/session/conversation.py).
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
/// The ids of answers are kept: as long as the template renders the same text, the next prompt begins with exactly the
/// ids in the prefix cache. Not thread-safe; several conversations of a session may run in several threads.
class MARS_API Conversation {
  public:
    Conversation(Conversation&&) noexcept = default;
    Conversation& operator=(Conversation&&) noexcept = default;

    /// Ask, and stream the answer, which belongs to the conversation and is valid until its next question. Throws
    /// SessionError for a question that cannot be asked; the conversation is then unchanged. If the context is full,
    /// the oldest turns are dropped if that was allowed.
    Stream& send(const std::string& text, const GenerationConfig& config = {});

    /// Ask `text` instead of the question of `turn` (an index of `turns`; negative: from the end). Later turns are
    /// dropped.
    Stream& edit(const std::string& text, const GenerationConfig& config = {}, std::int64_t turn = -1);

    void undo(std::int64_t turns = 1);

    /// Remove all turns; the system message stays.
    void reset();

    /// Replace the conversation by `messages`: optionally a system message, then questions with their answers.
    /// Unchanged turns keep their ids. Throws SessionError for messages in another order.
    void resume(const std::vector<Message>& messages);

    /// The turns so far, without an answer that still runs.
    std::vector<Turn> turns();

    /// The turns as chat messages, the system message first.
    std::vector<Message> messages();

    /// Turns that the last `send` dropped to make room.
    std::int64_t dropped() const;

  private:
    friend class Session;
    struct State;
    Conversation(std::shared_ptr<const Opened> session, std::optional<std::string> system, bool drop_oldest);

    std::shared_ptr<State> state_; // never shared
};

} // namespace mars
