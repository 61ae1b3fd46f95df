// No Python file: text to token ids and back, with the ids of Hugging Face `tokenizers`, which Python uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/turns.hpp"

namespace mars {

/// A BPE tokenizer read from a `tokenizer.json`. Immutable, cheap to copy, thread-safe.
///
/// Supports the GPT-2 / SmolLM, Qwen2 / Qwen3 and Llama 3 kinds (byte-level BPE, an optional NFC normalizer, their
/// split patterns, single digits) and the Llama 2 / Mistral kind, whose characters fall back to bytes; added tokens,
/// and a template post-processor. Anything else is refused by name.
class Tokenizer {
  public:
    /// Read the text of a `tokenizer.json`; `where` is its name in messages. Throws BundleError that lists everything
    /// wrong or not supported.
    /// `control_tokens` are plain text in messages, as all special tokens are.
    static Tokenizer from_json(std::string_view tokenizer_json, std::string_view where = "tokenizer.json",
                               const std::vector<std::string>& control_tokens = {});

    /// Token ids of a UTF-8 text. `add_special_tokens` also adds what the post-processor puts around a text, such as a
    /// begin-of-text token. Inside the spans `plain`, special and control tokens are plain text. Throws SessionError for
    /// invalid UTF-8.
    std::vector<int64_t> encode(std::string_view text, bool add_special_tokens = true, const Spans& plain = {}) const;

    /// Token ids of a part that does not begin a text: nothing is added in front.
    std::vector<int64_t> encode_within(std::string_view text) const;

    /// The text of ids, always valid UTF-8: bytes that form no character become U+FFFD, unknown ids nothing.
    /// `is_start`: the ids begin a text; tokenizers of the Llama 2 kind then drop a space.
    std::string decode(const std::vector<int64_t>& ids, bool skip_special_tokens = true, bool is_start = true) const;

    /// The bytes of one id, before they are read as UTF-8. Empty for unknown ids.
    std::string_view bytes_of(int64_t id, bool skip_special_tokens = true) const;
    size_t size() const;

    struct State;

  private:
    explicit Tokenizer(std::shared_ptr<const State> state);
    std::string joined(const std::vector<int64_t>& ids, bool skip_special_tokens, bool is_start) const;

    std::shared_ptr<const State> state_;
};

} // namespace mars
