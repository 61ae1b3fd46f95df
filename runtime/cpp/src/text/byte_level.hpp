// No Python file: GPT-2's byte-level alphabet: every byte as one printable character.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace mars {

/// The character, in UTF-8, that stands for each byte in `tokenizer.json`.
const std::array<std::string, 256>& byte_characters();

/// The bytes of a token's characters; no value if one of them stands for no byte. `token` is valid UTF-8.
std::optional<std::string> bytes_of_characters(std::string_view token);

} // namespace mars
