// Chat messages, and the growing text of an answer with its stop strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <mars/export.hpp>

namespace mars {

class Text;
class Tokenizer;

/// A chat message; UTF-8.
struct Message {
    std::string role;
    std::string content;
};

/// The growing text of one answer, created by Session::text_stream. Never shows an incomplete character, or text that
/// may become a stop string. For one thread at a time.
class MARS_API TextStream {
  public:
    /// Throws SessionError if a stop string is empty, invalid UTF-8 or longer than 256 characters, and for more than
    /// 16.
    explicit TextStream(const Text& text, std::vector<std::string> stop = {});

    /// Add a token; returns whether it completes a stop string. The text then ends before that string.
    bool push(std::int64_t token);

    /// The text that became final since the last call.
    std::string read();

    /// The rest of the text; an incomplete character becomes U+FFFD.
    std::string finish();

    /// The text so far, held-back text included, without the stop string.
    const std::string& text() const { return text_; }

    bool stopped() const { return stopped_; }

  private:
    void append(std::string_view piece);
    std::size_t held_back() const;
    std::string up_to(std::size_t end);

    std::shared_ptr<const Tokenizer> tokenizer_;
    std::vector<std::string> stop_;
    std::size_t longest_stop_ = 0;
    std::vector<std::int64_t> pending_; // tokens that do not form whole characters yet
    std::string text_;
    std::size_t shown_ = 0;
    bool stopped_ = false;
};

} // namespace mars
