// Text to words, as the split patterns of the known tokenizers do it, written out by hand. Knows no tokens.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace mars {

/// One way to cut a text. `digits`: each digit on its own. The others are regular expressions of tokenizer.json.
enum class Split { digits, gpt2, qwen2, llama3 };

/// The split whose pattern is written exactly like this, or nothing.
std::optional<Split> split_of_pattern(std::string_view pattern);

/// Append the pieces that `split` cuts `text` (valid UTF-8) into; together they are the whole text.
void cut(Split split, std::string_view text, std::vector<std::string_view>& pieces);

} // namespace mars
