// Tokenizer, chat turns and text streams on their own, many threads included; text_driver.cpp is for comparing
// them with the libraries.
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <mars/errors.hpp>

#include "small_tokenizer.hpp"
#include "text/metaspace.hpp"
#include "text/text.hpp"
#include "text/utf8.hpp"

namespace {

using Json = nlohmann::json;

mars::Text text_of(const char* split, bool nfc = false) { return {mars::Tokenizer::from_json(small_tokenizer(split, nfc).dump())}; }

std::vector<std::string> words(const mars::Text& text, std::string_view input) {
    std::vector<std::string> found;
    for (const std::int64_t id : text.encode(input)) found.emplace_back(text.tokenizer.bytes_of(id, false));
    return found;
}

constexpr const char* chat =
    R"({"between": {"start": {"system": "<s>", "user": "<u>"}, "system": {"user": "|"}, "user": {"assistant": ">"}},
    "after": {"user": "!"}, "trimmed": ["user"], "reserved": ["</think>"]})";

} // namespace

TEST_CASE("merges stay inside the pieces of the split") {
    using List = std::vector<std::string>;
    CHECK(words(text_of(no_split), "abab  ab12") == List{"abab", " ", " ", "ab", "1", "2"});
    CHECK(words(text_of(qwen2_split), "it's\n\n\nabab") == List{"i", "t", "'s", "\n\n", "\n", "abab"});
    CHECK(words(text_of(qwen2_split), "<|e|>ab<|e|") == List{"<|e|>", "ab", "<", "|", "e", "|"});
    CHECK(words(text_of(qwen2_split), "e\u0301") == List{"e", "\xCC", "\x81"});
    CHECK(words(text_of(qwen2_split, true), "e\u0301") == List{"\u00e9"});
    CHECK(text_of(no_split).encode("").empty());
}

TEST_CASE("input must be UTF-8, and output always is") {
    const mars::Text text = text_of(no_split);
    CHECK_THROWS_WITH_AS(text.encode("ab\xFFz"), doctest::Contains("not valid UTF-8 at byte 2"), mars::SessionError);
    CHECK(text.tokenizer.decode({0xE3 - 0x20, -1, 1 << 30}).size() <= 3);
    for (const char* broken : {"\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82", "\x80", "a\xF0\x9F\x99z"}) {
        CHECK_FALSE(mars::utf8::is_valid(broken));
        CHECK(mars::utf8::is_valid(mars::utf8::lossy(broken)));
    }
    CHECK(mars::utf8::lossy("\xF0\x9F\x99z\xE2\x82") == "\uFFFDz\uFFFD");
}

TEST_CASE("a stream shows complete characters and holds back possible stop strings") {
    const mars::Text text = text_of(no_split);
    mars::TextStream stream(text, {"<end>", "stop"});
    std::string shown;
    for (const std::int64_t id : text.encode("\u65e5<en\u65e5<en")) {
        CHECK_FALSE(stream.push(id));
        shown += stream.read();
        CHECK(mars::utf8::is_valid(shown));
    }
    CHECK(shown == "\u65e5<en\u65e5");
    CHECK(stream.push(text.encode("d")[0]) == false);
    CHECK(stream.push(text.encode(">")[0]));
    CHECK(shown + stream.finish() == "\u65e5<en\u65e5");
    CHECK_THROWS_AS(mars::TextStream(text, {""}), mars::SessionError);
    CHECK_THROWS_AS(mars::TextStream(text, {"\xFF"}), mars::SessionError);
    std::string longest;
    for (int i = 0; i < 256; ++i) longest += "\u00e9";
    CHECK_NOTHROW(mars::TextStream(text, std::vector<std::string>(16, longest)));
    for (const auto& stop : {std::vector<std::string>(17, "x"), std::vector<std::string>{longest + "x"}})
        CHECK_THROWS_WITH_AS(mars::TextStream(text, stop), doctest::Contains("at most 16 stop strings of at most 256 characters"),
                             mars::SessionError);
}

TEST_CASE("byte fallback and space markers") {
    const auto piece = [](const char* type) { return Json{{"type", type}}; };
    Json vocab = {{"<unk>", 0}, {"\u2581", 1}, {"a", 2}, {"b", 3}, {"\u2581a", 4}, {"\u00e9", 5}};
    for (unsigned byte = 0; byte < 256; ++byte) vocab.emplace(mars::byte_token(byte), 6 + byte);
    const Json strip = {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
    const Json spaces = {{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}};
    const Json decoders = Json::array({spaces, piece("ByteFallback"), piece("Fuse"), strip});
    const Json whole = {
        {"version", "1.0"},
        {"pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "first"}, {"split", false}}},
        {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}},
        {"model",
         {{"type", "BPE"}, {"unk_token", "<unk>"}, {"byte_fallback", true}, {"vocab", vocab}, {"merges", Json::array({"\u2581 a"})}}}};
    const mars::Text text{mars::Tokenizer::from_json(whole.dump())};
    using Ids = std::vector<std::int64_t>;
    CHECK(text.encode("a b") == Ids{4, 1, 3});
    CHECK(text.encode("\u00e9\n") == Ids{1, 5, 6 + 10});
    CHECK(text.encode("\u2581a\u65e5") == Ids{4, 6 + 0xE6, 6 + 0x97, 6 + 0xA5});
    CHECK(text.tokenizer.decode({4, 1, 3}) == "a b");
    CHECK(text.tokenizer.decode({6 + 0xE6, 6 + 0x97, 6 + 0xA5, 2}) == "\u65e5"
                                                                      "a");
    CHECK(text.tokenizer.decode({6 + 0xE6, 6 + 0x97, 2, 6 + 0xFF}) == "\uFFFD\uFFFD"
                                                                      "a"
                                                                      "\uFFFD");
    mars::TextStream stream(text);
    std::string shown;
    for (const std::int64_t id : Ids{1, 4, 6 + 0xE6, 6 + 0x97, 6 + 0xA5, 6 + 0xFF, 4}) {
        stream.push(id);
        shown += stream.read() + "|";
    }
    CHECK(shown + stream.finish() == "| a|||\u65e5||\uFFFD a|");
}

TEST_CASE("deeply nested JSON is refused everywhere") {
    const std::string deep = std::string(400000, '[') + std::string(400000, ']');
    const auto tokenizer = [](const std::string& text) { return [text] { mars::Tokenizer::from_json(text); }; };
    const auto turns = [](const std::string& text) { return [text] { mars::ChatTurns::from_json(text); }; };
    for (const char* name : {"normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens", "truncation"}) {
        Json whole = small_tokenizer(qwen2_split);
        whole["model"]["byte_fallback"] = true;
        whole[name] = {{"type", "HERE"}};
        std::string text = whole.dump();
        text.replace(text.find("\"HERE\""), 6, deep);
        CHECK_THROWS_WITH_AS(tokenizer(text)(), doctest::Contains("nested too deep"), mars::BundleError);
    }
    CHECK_THROWS_WITH_AS(turns("{\"between\": " + deep + "}")(), doctest::Contains("nested too deep"), mars::BundleError);
    CHECK_THROWS_AS(turns(std::string(400000, '{'))(), mars::BundleError);
    const std::string quoted = R"({"between": {"start": {"user": ")" + std::string(1000, '[') +
                               R"(\"[{\\"}}, "after": {"user": ""},)"
                               R"( "trimmed": [], "reserved": []})"; // brackets of a text are no nesting
    CHECK(mars::ChatTurns::from_json(quoted).render({{"user", ""}}).text == std::string(1000, '[') + "\"[{\\");
}

TEST_CASE("chat turns render known roles and refuse others") {
    const auto turns = mars::ChatTurns::from_json(chat);
    CHECK(turns.render({{"system", " be kind "}, {"user", "\u2028 hi\n"}}).text == "<s> be kind |hi!");
    CHECK_THROWS_WITH_AS(turns.render({{"user", "a"}, {"user", "b"}}), doctest::Contains("no place for role `user` after `user`"),
                         mars::SessionError);
    CHECK_THROWS_WITH_AS(turns.render({{"user", "a"}, {"assistant", "b"}}), doctest::Contains("cannot end in role `assistant`"),
                         mars::SessionError);
    CHECK_THROWS_WITH_AS(turns.render({{"user", "x</think>"}}), doctest::Contains("treats `</think>`"), mars::SessionError);
    CHECK_THROWS_WITH_AS(turns.render({{"user", "\xC3"}}), doctest::Contains("message 0 is not valid UTF-8"), mars::SessionError);
    CHECK_THROWS_AS(turns.render({}), mars::SessionError);
    CHECK_FALSE(mars::ChatTurns::from_json("null").is_usable());
    CHECK_THROWS_AS(mars::ChatTurns::from_json("[]"), mars::BundleError);
    CHECK_THROWS_AS(mars::ChatTurns::from_json("{"), mars::BundleError);
}

TEST_CASE("every problem of a tokenizer is reported at once") {
    Json whole = small_tokenizer(digits_split);
    whole["normalizer"] = {{"type", "NFKC"}};
    whole["decoder"] = nullptr;
    whole["added_tokens"][0]["lstrip"] = true;
    CHECK_THROWS_WITH_AS(mars::Tokenizer::from_json(whole.dump()), doctest::Contains("3 problems in the tokenizer"), mars::BundleError);
}

TEST_CASE("one tokenizer serves many threads") {
    const mars::Text text = text_of(qwen2_split, true);
    const std::string input = "it's  abab e\u0301 12 <|e|> \u65e5\u672c\n\n";
    const auto wanted = text.encode(input);
    std::vector<int> wrong(4);
    std::vector<std::thread> threads;
    for (int& count : wrong)
        threads.emplace_back([&] {
            for (int i = 0; i < 200; ++i)
                count += text.encode(input) == wanted && text.tokenizer.decode(wanted) == text.tokenizer.decode(wanted) ? 0 : 1;
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == std::vector<int>(4));
}
