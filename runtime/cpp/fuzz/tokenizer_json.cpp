// Any bytes as tokenizer.json and as a chat template: read or refused with BundleError, nothing else. What is read also works.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <mars/errors.hpp>

#include "deep.hpp"
#include "text/text.hpp"

namespace {

void use(const mars::Tokenizer& tokenizer, std::string_view input) {
    for (const std::string_view text : {std::string_view("It's  12 caf\u0065\u0301\r\n\u65e5\u672c <|im_end|>"), input.substr(0, 2000)}) {
        try {
            const auto ids = tokenizer.encode(text);
            tokenizer.decode(ids.data(), ids.size());
        } catch (const mars::SessionError&) { // not UTF-8
        }
    }
}

} // namespace

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
