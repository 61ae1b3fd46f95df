// Text in, text out: chat messages, and the growing text of an answer with its stop strings.
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

/// One turn of a conversation; UTF-8.
struct Message {
    std::string role;
    std::string content;
};

/// The growing text of one answer, which Session::text_stream begins. Never shows half a character, nor text that may turn out to be a
/// stop string. One thread at a time.
class MARS_API TextStream {
  public:
    /// Throws SessionError when a stop string is empty or not valid UTF-8, or has more than 256 characters, and for more than 16.
    explicit TextStream(const Text& text, std::vector<std::string> stop = {});

    /// Add a token; returns whether it completes a stop string, which ends the text before that string.
    bool push(std::int64_t token);

    /// The text that became certain since the last call.
    std::string read();

    /// All text not shown yet; an unfinished character becomes U+FFFD.
    std::string finish();

    /// Everything so far, held-back text included, without the stop string.
    const std::string& text() const { return text_; }

    bool stopped() const { return stopped_; }

  private:
    void append(std::string_view piece);
    std::size_t held_back() const;
    std::string up_to(std::size_t end);

    std::shared_ptr<const Tokenizer> tokenizer_;
    std::vector<std::string> stop_;
    std::size_t longest_stop_ = 0;
    std::vector<std::int64_t> pending_; // tokens that do not end in a whole character yet
    std::string text_;
    std::size_t shown_ = 0;
    bool stopped_ = false;
};

} // namespace mars
