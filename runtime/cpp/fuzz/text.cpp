// Fuzzes texts: any bytes as a text, a stream of tokens and stop strings. Checks whole characters and round trips.
#include "text/text.hpp"

#include <mars/errors.hpp>

#include "../tests/small_tokenizer.hpp"
#include "fuzz.hpp"
#include "text/utf8.hpp"

namespace {

mars::Text made(const char* pre_tokenizers, bool nfc = false) {
    return {mars::Tokenizer::from_json(small_tokenizer(pre_tokenizers, nfc).dump())};
}

const std::vector<mars::Text>& texts() {
    static const std::vector<mars::Text> all = {made(no_split), made(digits_split), made(qwen2_split), made(qwen2_split, true)};
    return all;
}

} // namespace

std::vector<std::string> seeds() {
    const std::string words = "It's  12 caf\u0065\u0301 h\u00e9\r\n\n\t\u65e5\u672c\u8a9e \U0001F600 abababab 's <|e|>",
                      odd = "\xF0\x9F\x98 \xC3\xA9\xFF \xED\xA0\x80";
    std::string large;
    while (large.size() < 6000) large += words;
    std::vector<std::string> made;
    for (char which = 0; which < 4; ++which)
        for (const std::string& text : {words, odd, large}) made.push_back(std::string{which, '\3', '\2'} + text);
    return made;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 3) return 0;
    const mars::Text& text = texts()[data[0] % texts().size()];
    const std::string_view input(reinterpret_cast<const char*>(data) + 3, size - 3);
    if (mars::utf8::is_valid(input)) {
        const auto ids = text.encode(input);
        if (&text != &texts().back()) require(text.tokenizer.decode(ids, false) == input, "ids say the same text");
    }
    std::vector<std::string> stop;
    if (const std::string word = mars::utf8::lossy(input.substr(0, data[1] % 5)); !word.empty()) stop.push_back(word);
    mars::TextStream stream(text, stop);
    std::string shown;
    for (const char byte : input.substr(data[2] % 5 < input.size() ? data[2] % 5 : 0)) {
        const bool stopped = stream.push(static_cast<unsigned char>(byte) + data[2] % 16);
        const std::string piece = stream.read();
        require(mars::utf8::is_valid(piece), "what is shown is whole characters");
        shown += piece;
        if (stopped) break;
    }
    shown += stream.finish();
    require(shown == stream.text(), "what is shown is the text");
    if (!stop.empty()) require(shown.find(stop[0]) == std::string::npos, "no stop string is shown");
    return 0;
}
