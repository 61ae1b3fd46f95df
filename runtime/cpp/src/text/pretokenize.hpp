// No Python file: splits text into words, with the patterns of known tokenizers written out by hand.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace mars {

/// A way to split a text. `digits`: each digit on its own. The others are regular expressions of tokenizer.json.
enum class Split { digits, gpt2, qwen2, llama3 };

/// The split with exactly this pattern, or no value.
std::optional<Split> split_of_pattern(std::string_view pattern);

/// Append the pieces of `text` (valid UTF-8); together they are the whole text.
void cut(Split split, std::string_view text, std::vector<std::string_view>& pieces);

} // namespace mars
