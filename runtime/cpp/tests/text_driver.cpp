// Answers questions about text, one JSON object a line on standard input, one line each on standard output.
// In tests/runtime/cpp, test_cpp_tokenizer.py, test_cpp_tokenizer_json.py, test_cpp_text_stream.py,
// test_cpp_turns.py and test_cpp_thinking.py compare its answers with Hugging Face `tokenizers`, jinja2 and runtime/text/tokenizer.py.
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "text/text.hpp"
#include "text/unicode.hpp"

namespace {

using Json = nlohmann::json;

/// One hexadecimal digit for each code point: 1 letter, 2 number, 4 space, 8 digit.
Json classes() {
    std::string all;
    for (char32_t c = 0; c < 0x110000; ++c) {
        const mars::CharClass kind = mars::class_of(c);
        const int bits = (kind == mars::CharClass::letter ? 1 : 0) | (kind == mars::CharClass::number ? 2 : 0) |
                         (kind == mars::CharClass::space ? 4 : 0) | (mars::is_digit(c) ? 8 : 0);
        all += "0123456789abcdef"[bits];
    }
    return all;
}

Json stream(const mars::Text& text, const Json& asked) {
    mars::TextStream stream(text, asked.at("stop").get<std::vector<std::string>>());
    std::vector<std::string> pieces;
    std::size_t taken = 0;
    for (const std::int64_t token : asked.at("ids").get<std::vector<std::int64_t>>()) {
        ++taken;
        const bool stopped = stream.push(token);
        pieces.push_back(stream.read());
        if (stopped) break;
    }
    pieces.push_back(stream.finish());
    return {{"pieces", pieces}, {"text", stream.text()}, {"taken", taken}};
}

Json thinking(const Json& asked) {
    mars::ThinkingStream stream(asked.at("open"), asked.at("close"), asked.at("is_open"));
    mars::ThinkingStream::Piece all;
    const auto add = [&](const mars::ThinkingStream::Piece& piece) { all = {all.thinking + piece.thinking, all.text + piece.text}; };
    for (const std::string piece : asked.at("pieces")) add(stream.push(piece));
    add(stream.finish());
    return {all.thinking, all.text, stream.size()};
}

Json render(const Json& asked) {
    std::vector<mars::Message> messages;
    for (const Json& message : asked.at("messages")) messages.push_back({message.at("role"), message.at("content")});
    return mars::ChatTurns::from_json(asked.at("chat").dump()).render(messages).text;
}

Json answer(const mars::Text& text, const Json& asked) {
    const auto op = asked.at("op").get<std::string>();
    if (op == "encode")
        return text.tokenizer.encode(asked.at("text").get<std::string>(), asked.value("special", true),
                                     asked.value("plain", mars::Spans()));
    if (op == "decode") return text.tokenizer.decode(asked.at("ids"), asked.value("skip", true));
    if (op == "stream") return stream(text, asked);
    if (op == "render") return render(asked);
    if (op == "thinking") return thinking(asked);
    if (op == "nfc") {
        const auto before = asked.at("text").get<std::string>();
        return mars::to_nfc(before).value_or(before);
    }
    if (op == "classes") return classes();
    throw std::invalid_argument("unknown op " + op);
}

} // namespace

int main(int count, char** words) {
    if (count != 2) return std::cerr << "usage: text_driver TOKENIZER.JSON < questions\n", 2;
    std::ifstream file(words[1], std::ios::binary);
    const std::string json{std::istreambuf_iterator<char>(file), {}};
    const auto say = [](const Json& line) { std::cout << line.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl; };
    try {
        const mars::Text text{mars::Tokenizer::from_json(json)};
        say({{"size", text.tokenizer.size()}});
        for (std::string line; std::getline(std::cin, line);) {
            try {
                say({{"answer", answer(text, Json::parse(line))}});
            } catch (const mars::Error& error) {
                say({{"error", error.what()}});
            }
        }
    } catch (const mars::BundleError& error) {
        say({{"error", error.what()}});
    }
}
