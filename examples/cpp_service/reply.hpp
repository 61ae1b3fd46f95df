// Answers as the JSON that goes back: bodies, chunks and what they say of how it was made. Knows no HTTP and runs nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <mars/batcher.hpp>

#include "openai.hpp"

namespace openai {

struct Token {
    std::int64_t id;
    std::string text;
    double p;
    const char* how; ///< verified: proposed, and held; else accepted from the model
};

/// `number` counts from 0; `end` is where its text ends in the answer's.
struct Step {
    std::int64_t number;
    std::vector<Token> tokens;
    std::size_t end;
};

/// Which tokens came in which step, with the text of each: their texts joined are the answer's. A step is handed out once all its text
/// was shown.
class Steps {
  public:
    explicit Steps(mars::TextStream text) : text_(std::move(text)) {}

    /// Take in an event; the steps that are complete now, all of them with the last event.
    std::vector<Step> push(const mars::Event& event);

  private:
    std::vector<Step> rest();

    mars::TextStream text_;
    std::deque<Step> held_;
    std::size_t spelled_ = 0, shown_ = 0;
    std::int64_t number_ = 0;
};

/// One of the answers to an ask.
struct Choice {
    std::int64_t index;
    mars::Request request;
    std::optional<Steps> steps = std::nullopt; ///< where steps or log probabilities are asked for
    std::vector<Step> made = {};
    std::size_t num_shown = 0;                               ///< characters of the text that chunks had
    std::optional<mars::FinishReason> reason = std::nullopt; ///< once it is over
};

/// The answers to one ask, under one id.
class Reply {
  public:
    /// `config`: what was asked for with what a profile sets.
    Reply(const std::string& number, std::string model, const Ask& ask);

    const std::string id;
    std::vector<Choice> choices;

    bool is_over() const;

    /// All of it, when it is over.
    Json body() const;

    /// The chunks that a stream begins with.
    std::vector<Json> opening() const;

    /// What a stream says of an event: nothing where it adds nothing; its last chunks at the end.
    std::vector<Json> chunks(Choice& choice, const mars::Event& event);

    /// Take in an event of a whole answer.
    void push(Choice& choice, const mars::Event& event) const;

    /// What holds: exact, tau, metric, profile, window, level.
    Json settings() const;

  private:
    bool is_chat() const { return ask_.kind == Kind::chat; }
    Json head(const char* object, Json entries) const;
    Json chunk(Json entry) const;
    Json entry(const Choice& choice, const std::string* text, const std::vector<Step>& steps) const;
    Json logprobs(const std::vector<Step>& steps, std::size_t offset) const;
    Json usage() const;
    void record(Json& target) const;

    const std::string model_;
    const Ask ask_;
    const std::int64_t created_;
};

} // namespace openai
