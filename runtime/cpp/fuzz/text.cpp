// Any bytes as a text, a stream of tokens and stop strings: whole characters, the same text again, no crash.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>
#include <mars/text.hpp>

#include "byte_level.hpp"
#include "utf8.hpp"

namespace {

using Json = nlohmann::json;

void require(bool good) {
    if (!good) std::abort();
}

/// A small tokenizer whose words are cut as `pre_tokenizers` says.
mars::Text made(const char* pre_tokenizers, const char* normalizer) {
    Json vocab = Json::object();
    for (const std::string& character : mars::byte_characters()) vocab.emplace(character, vocab.size());
    Json merges = Json::array();
    const std::pair<const char*, const char*> pairs[] = {{"a", "b"}, {"ab", "ab"}, {"Ġ", "a"}, {"Ġ", "Ġ"},
                                                         {"Ċ", "Ċ"}, {"Ã", "©"},   {"'", "s"}};
    for (const auto& [left, right] : pairs) {
        vocab.emplace(std::string(left) + right, vocab.size());
        merges.push_back({left, right});
    }
    const Json special = {{"id", vocab.size()}, {"content", "<|e|>"},  {"single_word", false}, {"lstrip", false},
                          {"rstrip", false},    {"normalized", false}, {"special", true}};
    Json splits = Json::parse(pre_tokenizers);
    splits.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", splits.empty()}});
    const Json whole = {{"version", "1.0"},
                        {"added_tokens", {special}},
                        {"normalizer", Json::parse(normalizer)},
                        {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", splits}}},
                        {"decoder", {{"type", "ByteLevel"}}},
                        {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
    return mars::Text(mars::Tokenizer::from_json(whole.dump()));
}

constexpr const char* qwen2 =
    R"([{"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}])";

const std::vector<mars::Text>& texts() {
    static const std::vector<mars::Text> all = {made("[]", "null"), made(R"([{"type":"Digits","individual_digits":true}])", "null"),
                                                made(qwen2, "null"), made(qwen2, R"({"type":"NFC"})")};
    return all;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 3) return 0;
    const mars::Text& text = texts()[data[0] % texts().size()];
    const std::string_view input(reinterpret_cast<const char*>(data) + 3, size - 3);
    if (mars::utf8::is_valid(input)) {
        const auto ids = text.encode(input);
        if (&text != &texts().back()) require(text.tokenizer().decode(ids.data(), ids.size(), false) == input);
    }
    std::vector<std::string> stop;
    if (const std::string word = mars::utf8::lossy(input.substr(0, data[1] % 5)); !word.empty()) stop.push_back(word);
    mars::TextStream stream(text, stop);
    std::string shown;
    for (const char byte : input.substr(data[2] % 5 < input.size() ? data[2] % 5 : 0)) {
        const bool stopped = stream.push(static_cast<unsigned char>(byte) + data[2] % 16);
        shown += stream.read();
        require(mars::utf8::is_valid(shown));
        if (stopped) break;
    }
    shown += stream.finish();
    require(shown == stream.text());
    if (!stop.empty()) require(shown.find(stop[0]) == std::string::npos);
    return 0;
}
