// Any bytes as a text, a stream of tokens and stop strings: whole characters, the same text again, no crash.
#include "text/text.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <mars/errors.hpp>

#include "../tests/small_tokenizer.hpp"
#include "utf8.hpp"

namespace {

void require(bool good) {
    if (!good) std::abort();
}

mars::Text made(const char* pre_tokenizers, bool nfc = false) {
    return mars::Text(mars::Tokenizer::from_json(small_tokenizer(pre_tokenizers, nfc).dump()));
}

const std::vector<mars::Text>& texts() {
    static const std::vector<mars::Text> all = {made(no_split), made(digits_split), made(qwen2_split), made(qwen2_split, true)};
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
