// Any bytes as the example service's requests: a head and a body that are read, or a refusal, nothing else.
#include "../../../examples/cpp_service/http.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "../../../examples/cpp_service/openai.hpp"
#include "../../../examples/cpp_service/request.hpp"
#include "deep.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view input(reinterpret_cast<const char*>(data), size);
    const http::Limits limits;
    try {
        const http::Head head = http::parse_head(input, limits);
        if (head.body_bytes > limits.body_bytes || head.target.empty() || head.target.front() != '/') std::abort();
    } catch (const http::Refusal& refusal) {
        if (refusal.status < 400 || refusal.status > 499) std::abort();
    }
    const std::string body = deepened(data, size);
    try {
        parse_request(body, Limits());
    } catch (const BadRequest&) {
    }
    try {
        openai::read_ask(openai::Kind::chat, body, openai::Limits());
    } catch (const openai::Refused& refused) {
        if (refused.status < 400 || refused.status > 499) std::abort();
        openai::text_of(openai::error(refused.status, refused.what(), refused.param, refused.code_word));
    }
    return 0;
}
