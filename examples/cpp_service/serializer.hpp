// Formats answers as JSON: bodies, chunks, statistics.
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
    const char* how; ///< "accepted", "verified" after it was proposed, or "forced" by a grammar
    bool is_thinking = false;
};

/// `number` counts from 0; `end` is where the step's text ends in the answer's.
struct Step {
    std::int64_t number;
    std::vector<Token> tokens;
    std::size_t end;
};

/// Which tokens came in which step, with the text of each; joined, their texts are the answer's. A step is returned
/// once all its text was shown.
class Steps {
  public:
    explicit Steps(mars::TextStream text) : text_(std::move(text)) {}

    /// Add an event; returns the steps that are complete now, all of them after the last event.
    std::vector<Step> push(const mars::Event& event);

  private:
    std::vector<Step> rest();

    mars::TextStream text_;
    std::deque<Step> held_;
    std::size_t spelled_ = 0, shown_ = 0;
    std::int64_t number_ = 0;
};

/// One of the answers to a request.
struct Choice {
    std::int64_t index;
    mars::Request request;
    std::optional<Steps> steps = std::nullopt;                   ///< set if steps are requested, or for thinking
    std::optional<mars::ThinkingStream> thinking = std::nullopt; ///< set if the answer may begin with thinking
    mars::ThinkingStream::Piece said = {};                       ///< the whole answer so far
    std::size_t num_spelled = 0;                                 ///< bytes of the tokens of all steps
    std::int64_t num_thinking = 0;                               ///< tokens
    std::vector<Step> made = {};
    std::optional<mars::FinishReason> reason = std::nullopt; ///< set when it is over
};

/// The answers to one request, under one id.
class Serializer {
  public:
    Serializer(const std::string& number, std::string model, const ApiRequest& api_request);

    const std::string id;
    std::vector<Choice> choices;

    bool is_over() const;

    /// The whole answer, when it is over.
    Json body() const;

    /// The first chunks of a stream.
    std::vector<Json> opening() const;

    /// The chunks of an event, possibly none; the last chunks at the end.
    std::vector<Json> chunks(Choice& choice, const mars::Event& event);

    /// Add an event of an answer; returns what it says.
    mars::ThinkingStream::Piece push(Choice& choice, const mars::Event& event) const;

    /// The current settings: exact, tau, metric, profile, masks, level.
    Json settings() const;

  private:
    bool is_chat() const { return ask_.kind == Kind::chat; }
    Json head(const char* object, Json entries) const;
    Json chunk(Json entry) const;
    Json entry(const Choice& choice, const mars::ThinkingStream::Piece& said, const std::vector<Step>& steps) const;
    Json usage() const;
    void record(Json& target) const;

    const std::string model_;
    const ApiRequest ask_;
    const std::int64_t created_;
};

} // namespace openai
