// A tokenizer.json of all bytes, seven merges and one special token, for tests and fuzzing.
#pragma once

#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "text/byte_level.hpp"

/// The list of pre-tokenizers before the last one, ByteLevel.
constexpr const char* no_split = "[]"; // ByteLevel splits by itself, as GPT-2 does
constexpr const char* digits_split = R"([{"type": "Digits", "individual_digits": true}])";
constexpr const char* qwen2_split =
    R"([{"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}])";

/// The whole file, whose words are cut as `pre_tokenizers` says.
inline nlohmann::json small_tokenizer(const char* pre_tokenizers, bool nfc = false) {
    using Json = nlohmann::json;
    Json vocab = Json::object(), merges = Json::array();
    for (const std::string& character : mars::byte_characters()) vocab.emplace(character, vocab.size());
    const std::pair<const char*, const char*> pairs[] = {{"a", "b"}, {"ab", "ab"}, {"Ġ", "a"}, {"Ġ", "Ġ"},
                                                         {"Ċ", "Ċ"}, {"Ã", "©"},   {"'", "s"}};
    for (const auto& [left, right] : pairs) {
        vocab.emplace(std::string(left) + right, vocab.size());
        merges.push_back({left, right});
    }
    const Json special = {{"id", vocab.size()}, {"content", "<|e|>"},  {"single_word", false}, {"lstrip", false},
                          {"rstrip", false},    {"normalized", false}, {"special", true}};
    Json splits = Json::parse(pre_tokenizers);
    const bool by_itself = pre_tokenizers != qwen2_split;
    splits.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", by_itself}});
    return {{"version", "1.0"},
            {"added_tokens", Json::array({special})},
            {"normalizer", nfc ? Json{{"type", "NFC"}} : Json()},
            {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", splits}}},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}
