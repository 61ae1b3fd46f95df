// Fuzzes tokenizer.json and chat templates: any bytes are read or refused with BundleError. What is read also works.
#include <mars/errors.hpp>

#include "../tests/small_tokenizer.hpp"
#include "deep.hpp"
#include "fuzz.hpp"
#include "text/text.hpp"

namespace {

void use(const mars::Tokenizer& tokenizer, std::string_view input) {
    for (const std::string_view text : {std::string_view("It's  12 caf\u0065\u0301\r\n\u65e5\u672c <|im_end|>"), input.substr(0, 2000)}) {
        try {
            const auto ids = tokenizer.encode(text);
            tokenizer.decode(ids);
        } catch (const mars::SessionError&) { // not UTF-8
        }
    }
}

} // namespace

std::vector<std::string> seeds() {
    using Json = nlohmann::json;
    const std::string space = "\u2581";
    Json vocab = {{"<s>", 0}};
    for (int byte = 0; byte < 256; ++byte) {
        const char* hex = "0123456789ABCDEF";
        vocab[std::string("<0x") + hex[byte / 16] + hex[byte % 16] + ">"] = byte + 1;
    }
    for (const std::string& token : {space, std::string("a"), space + "a", std::string("b")}) vocab[token] = vocab.size();
    const Json blank = {{"String", " "}}, mark = {{"String", space}};
    const Json pieces = {
        {"version", "1.0"},
        {"added_tokens",
         {{{"id", 0},
           {"content", "<s>"},
           {"special", true},
           {"normalized", false},
           {"single_word", false},
           {"lstrip", true},
           {"rstrip", false}}}},
        {"normalizer",
         {{"type", "Sequence"},
          {"normalizers", {{{"type", "Prepend"}, {"prepend", space}}, {{"type", "Replace"}, {"pattern", blank}, {"content", space}}}}}},
        {"pre_tokenizer", nullptr},
        {"decoder",
         {{"type", "Sequence"},
          {"decoders",
           {{{"type", "Replace"}, {"pattern", mark}, {"content", " "}},
            {{"type", "ByteFallback"}},
            {{"type", "Fuse"}},
            {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
        {"model",
         {{"type", "BPE"},
          {"byte_fallback", true},
          {"fuse_unk", true},
          {"unk_token", "<s>"},
          {"vocab", vocab},
          {"merges", {space + " a"}}}}};
    return {
        small_tokenizer(no_split).dump(),
        small_tokenizer(qwen2_split, true).dump(),
        small_tokenizer(digits_split).dump(2),
        pieces.dump(),
        "{\"model\": \x01\x02}",
        R"({"between": {"start": {"system": "<s>", "user": "<u>"}, "system": {"user": "<u>"}}, "after": {"user": "<e>"}, "trimmed": ["system"], "reserved": ["<r>"]})",
    };
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string input = deepened(data, size);
    try {
        use(mars::Tokenizer::from_json(input), input);
    } catch (const mars::BundleError&) {
    }
    try {
        mars::ChatTurns::from_json(input).render({{"system", " a "}, {"user", "b"}});
    } catch (const mars::Error&) {
    }
    return 0;
}
