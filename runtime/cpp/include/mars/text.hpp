// Chat messages, and the growing text of an answer with its stop strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mars/export.hpp>

namespace mars {

struct Text;
class Tokenizer;

/// A chat message; UTF-8.
struct Message {
    std::string role;
    std::string content;
};

/// Splits a growing answer into the thinking at its beginning and the text after it, created by
/// Session::thinking_stream.
///
/// The thinking is between the marks. Everything else is text, also later marks. The marks, with the white space next to
/// them, belong to neither.
class MARS_API ThinkingStream {
  public:
    struct Piece {
        std::string thinking, text;
    };

    /// `is_open`: the prompt ends with the opening mark.
    ThinkingStream(std::string open, std::string close, bool is_open);

    /// The parts that `text`, whole characters of the answer, adds.
    Piece push(std::string_view text);

    /// The held-back rest, at the end of the answer.
    Piece finish();

    /// Bytes at the beginning of the answer that are thinking or marks, as far as it is known.
    std::size_t size() const;

    /// Whether the answer may still begin with the opening mark.
    bool is_undecided() const { return place_ == Place::start; }

    /// Whether the text after the thinking has begun.
    bool is_over() const { return place_ == Place::text; }

  private:
    enum class Place { start, begun, thinking, closed, text };

    std::string think();

    std::string open_, close_;
    Place place_;
    std::string held_;
    std::size_t pushed_ = 0, size_ = 0;
};

/// The growing text of one answer, created by Session::text_stream. Never shows an incomplete character, or text that
/// may become a stop string. For one thread at a time.
class MARS_API TextStream {
  public:
    /// Stop strings in the thinking that `thinking` splits off have no effect. Throws SessionError if a stop string is
    /// empty, invalid UTF-8 or longer than 256 characters, and for more than 16.
    explicit TextStream(const Text& text, std::vector<std::string> stop = {}, std::optional<ThinkingStream> thinking = std::nullopt);

    /// Add a token; returns whether it completes a stop string. The text then ends before that string.
    bool push(std::int64_t token);

    /// The text that became final since the last call.
    std::string read();

    /// The rest of the text; an incomplete character becomes U+FFFD.
    std::string finish();

    /// The text so far, held-back text included, without the stop string.
    const std::string& text() const { return text_; }

    /// Whether a stop string ended the text; later tokens add nothing.
    bool stopped() const { return stopped_; }

  private:
    void append(std::string_view piece);
    std::size_t held_back() const;
    std::string up_to(std::size_t end);

    std::shared_ptr<const Tokenizer> tokenizer_;
    std::vector<std::string> stop_;
    std::optional<ThinkingStream> thinking_;
    std::size_t longest_stop_ = 0, searched_ = 0; // bytes: of the longest, and of the text without a stop string
    std::vector<std::int64_t> pending_;           // tokens that do not form whole characters yet
    std::size_t known_ = 0;                       // bytes of their text that are in `text_`
    std::string text_;
    std::size_t shown_ = 0;
    bool stopped_ = false;
};

} // namespace mars
