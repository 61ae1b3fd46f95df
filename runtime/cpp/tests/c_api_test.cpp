// The C interface used wrongly: NULLs, sizes, constants. The files beside tests/runtime/cpp/test_cpp_generate.py
// use it rightly, on real bundles.
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include <mars/mars.h>

#include "c_api/handles.hpp"
#include "conformance.hpp"

#ifndef MARS_SANITIZED
namespace {
thread_local bool is_starving = false;
}

void* operator new(std::size_t size) {
    void* const made = is_starving ? nullptr : std::malloc(size > 0 ? size : 1);
    return made != nullptr ? made : throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace {

/// The message of an error that a call left; frees it.
std::string message_of(mars_error* error) {
    std::string text = mars_error_message(error);
    mars_error_free(error);
    return text;
}

} // namespace

TEST_CASE("NULL handles: empty values, and they can be freed") {
    CHECK(mars_abi_version() == MARS_ABI_VERSION);
    CHECK(std::string(mars_version()).find('.') != std::string::npos);
    CHECK(mars_error_status(nullptr) == MARS_OK);
    CHECK(std::strlen(mars_error_message(nullptr)) == 0);
    CHECK(std::strlen(mars_completion_text(nullptr, nullptr)) == 0);
    std::size_t sizes[] = {7, 7, 7};
    CHECK(std::string(mars_completion_text(nullptr, &sizes[0])).empty());
    CHECK(mars_completion_token_ids(nullptr, &sizes[1]) == nullptr);
    CHECK(mars_completion_confidences(nullptr, &sizes[2]) == nullptr);
    for (const std::size_t size : sizes) CHECK(size == 0);
    CHECK(mars_completion_finish_reason(nullptr) == MARS_NOT_FINISHED);
    CHECK(std::isnan(mars_stream_tau(nullptr)));
    CHECK(mars_conversation_dropped(nullptr) == 0);
    mars_error_free(nullptr);
    mars_session_close(nullptr);
    mars_stream_cancel(nullptr);
    mars_stream_close(nullptr);
    mars_completion_free(nullptr);
    mars_conversation_close(nullptr);
}

TEST_CASE("every exception is a status, with the code and field of the error") {
    const auto said = [](const auto& body, mars_status status) {
        mars_error* error = nullptr;
        CHECK(mars::c::guarded(&error, body) == status);
        CHECK(mars_error_status(error) == status);
        const std::string words = std::string(mars_error_code(error)) + " " + mars_error_field(error);
        mars_error_free(error);
        return words;
    };
    CHECK(said([] { throw mars::BundleError("x"); }, MARS_ERROR_BUNDLE) == "failed ");
    CHECK(said([] { throw mars::SessionError("x", "limit_exceeded", "stop"); }, MARS_ERROR_SESSION) == "limit_exceeded stop");
    CHECK(said([] { throw mars::DeviceError("x"); }, MARS_ERROR_DEVICE) == "failed ");
    CHECK(said([] { throw mars::DeviceLost("x"); }, MARS_ERROR_DEVICE_LOST) == "failed ");
    CHECK(said([] { throw mars::MemoryError("x"); }, MARS_ERROR_MEMORY) == "out_of_memory ");
    CHECK(said([] { throw mars::Overloaded("x", 2); }, MARS_ERROR_OVERLOADED) == "overloaded ");
    CHECK(said([] { throw mars::c::ArgumentError("x"); }, MARS_ERROR_ARGUMENT) == "invalid_value ");
    CHECK(said([] { throw std::bad_alloc(); }, MARS_ERROR_MEMORY) == "out_of_memory ");
    CHECK(said([] { throw 7; }, MARS_ERROR_INTERNAL) == "failed ");
    CHECK(std::strlen(mars_error_code(nullptr)) + std::strlen(mars_error_field(nullptr)) == 0);
}

#ifndef MARS_SANITIZED // a sanitizer has its own
TEST_CASE("without memory for an error there is still a status and a message") {
    mars_error* error = nullptr;
    is_starving = true;
    const mars_status status = mars_generate(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &error);
    is_starving = false;
    CHECK(status == MARS_ERROR_MEMORY);
    CHECK(mars_error_status(error) == MARS_ERROR_MEMORY);
    CHECK(message_of(error) == "out of memory");
}
#endif

TEST_CASE("session options") {
    mars_session_options given;
    mars_session_options_init(&given, sizeof given);
    const auto refusal = [&] {
        try {
            mars::c::options_of(&given);
            return std::string();
        } catch (const mars::c::ArgumentError& error) {
            return std::string(error.what());
        }
    };
    CHECK(mars::c::options_of(nullptr).verify == mars::Verify::once);
    CHECK_FALSE(mars::c::options_of(&given).on_log);
    given.verify = MARS_VERIFY_NEVER;
    CHECK(mars::c::options_of(&given).verify == mars::Verify::never);
    given.verify = MARS_VERIFY_ALWAYS;
    CHECK(mars::c::options_of(&given).verify == mars::Verify::always);
    given.verify = 3;
    CHECK(refusal() == "verify: not a mars_verify: 3");
    given.verify = 0;
    CHECK_FALSE(mars::c::options_of(&given).parse_special);
    given.parse_special = 1;
    CHECK(mars::c::options_of(&given).parse_special);
    CHECK(mars::c::options_of(&given).prefill_tokens == 256);
    given.prefill_tokens = 64;
    CHECK(mars::c::options_of(&given).prefill_tokens == 64);
    given.num_options = 2;
    CHECK(refusal() == "option_names must not be NULL");
    const char* names[] = {"a.b", "device_id"};
    const char* values[] = {"0", nullptr};
    given.option_names = names;
    CHECK(refusal() == "option_values must not be NULL");
    given.option_values = values;
    CHECK(refusal() == "a value of option_values must not be NULL");
    values[1] = "1";
    CHECK(mars::c::options_of(&given).options == std::map<std::string, std::string>{{"a.b", "0"}, {"device_id", "1"}});
    std::string heard;
    given.log_user = &heard;
    given.on_log = [](std::int32_t level, const char* line, void* user) {
        *static_cast<std::string*>(user) += std::to_string(level) + line;
    };
    mars::c::options_of(&given).on_log(mars::LogLevel::warning, "so");
    CHECK(heard == "2so");
}

TEST_CASE("a text of size 0 is empty") {
    mars_prompt prompt;
    mars_prompt_init(&prompt, sizeof prompt);
    CHECK(prompt.text_size == SIZE_MAX);
    prompt.text = "words";
    CHECK(*mars::c::prompt_of(&prompt).text() == "words");
    prompt.text_size = 3;
    CHECK(*mars::c::prompt_of(&prompt).text() == "wor");
    prompt.text_size = 0;
    prompt.text = reinterpret_cast<const char*>(1); // an empty slice of Rust
    CHECK(mars::c::prompt_of(&prompt).text()->empty());
}

TEST_CASE("filled structs: unknown fields of a newer caller are 0, memory after an older caller's struct is kept") {
    struct Newer {
        mars_stats known;
        double unknown[3];
    } newer;
    mars_stats values{};
    values.tokens = 4;
    for (const bool fills : {false, true}) {
        std::memset(&newer, 0xAB, sizeof newer);
        newer.known.struct_size = sizeof newer;
        if (fills)
            mars::c::fill(&newer.known, values, "stats");
        else
            mars_stats_init(&newer.known, sizeof newer);
        CHECK(newer.known.struct_size == sizeof newer);
        CHECK(newer.known.tokens == (fills ? 4 : 0));
        for (const double value : newer.unknown) CHECK(value == 0);
    }
    struct Older {
        std::size_t struct_size;
        std::int64_t prompt_tokens;
        std::int64_t guard;
    } older{offsetof(Older, guard), 3, 42};
    mars::c::fill(reinterpret_cast<mars_stats*>(&older), values, "stats");
    CHECK(older.struct_size == offsetof(Older, guard));
    CHECK(older.prompt_tokens == 0);
    CHECK(older.guard == 42);
}

TEST_CASE("a missing bundle is an error") {
    mars_session* session = nullptr;
    mars_error* error = nullptr;
    CHECK(mars_session_open("/no/such/bundle", nullptr, &session, &error) == MARS_ERROR_BUNDLE);
    CHECK(mars_error_status(error) == MARS_ERROR_BUNDLE);
    CHECK(session == nullptr);
    CHECK(message_of(error).find("/no/such/bundle: no such bundle; make one with") == 0);
    CHECK(mars_session_open("/no/such/bundle", nullptr, &session, nullptr) == MARS_ERROR_BUNDLE);
}

TEST_CASE("NULL for a required argument is an error") {
    mars_session* session = nullptr;
    mars_stream* stream = nullptr;
    mars_completion* completion = nullptr;
    mars_error* error = nullptr;
    mars_prompt prompt;
    mars_prompt_init(&prompt, sizeof prompt);
    prompt.text = "words";
    CHECK(mars_session_open(nullptr, nullptr, &session, &error) == MARS_ERROR_ARGUMENT);
    CHECK(message_of(error) == "path must not be NULL");
    CHECK(mars_session_open("x", nullptr, nullptr, &error) == MARS_ERROR_ARGUMENT);
    CHECK(message_of(error) == "session must not be NULL");
    CHECK(mars_generate(nullptr, &prompt, nullptr, nullptr, nullptr, &completion, &error) == MARS_ERROR_ARGUMENT);
    CHECK(message_of(error) == "session must not be NULL");
    CHECK(mars_generate(nullptr, nullptr, nullptr, nullptr, nullptr, &completion, &error) == MARS_ERROR_ARGUMENT);
    CHECK(message_of(error) == "prompt must not be NULL");
    mars_conversation* talk = nullptr;
    const char* messages = nullptr;
    for (const mars_status status : {mars_generate_batch(nullptr, nullptr, nullptr, 2, nullptr, nullptr, &completion, nullptr),
                                     mars_stream_open(nullptr, &prompt, nullptr, &stream, nullptr),
                                     mars_stream_next(nullptr, nullptr, nullptr, nullptr),
                                     mars_stream_set_tau(nullptr, 1, nullptr),
                                     mars_stream_completion(nullptr, &completion, nullptr),
                                     mars_completion_stats(nullptr, nullptr, nullptr),
                                     mars_session_describe(nullptr, nullptr, nullptr),
                                     mars_encode(nullptr, &prompt, nullptr, 0, nullptr, nullptr),
                                     mars_decode(nullptr, nullptr, 3, nullptr, 0, nullptr, nullptr),
                                     mars_session_prefix_stats(nullptr, nullptr, nullptr),
                                     mars_session_forget_prefixes(nullptr, nullptr),
                                     mars_session_warm_up(nullptr, nullptr),
                                     mars_session_set_cost(nullptr, nullptr, nullptr, 1, nullptr),
                                     mars_config_of_profile(nullptr, nullptr, nullptr, nullptr),
                                     mars_conversation_open(nullptr, nullptr, 0, &talk, nullptr),
                                     mars_conversation_open(nullptr, nullptr, 0, nullptr, nullptr),
                                     mars_conversation_send(nullptr, "x", nullptr, &stream, nullptr),
                                     mars_conversation_send(nullptr, nullptr, nullptr, nullptr, nullptr),
                                     mars_conversation_edit(nullptr, "x", nullptr, 0, &stream, nullptr),
                                     mars_conversation_undo(nullptr, 1, nullptr),
                                     mars_conversation_reset(nullptr, nullptr),
                                     mars_conversation_resume(nullptr, nullptr, nullptr),
                                     mars_conversation_messages(nullptr, &messages, nullptr)})
        CHECK(status == MARS_ERROR_ARGUMENT);
}

TEST_CASE("invalid prompts and settings are errors") {
    mars_completion* completion = nullptr;
    mars_error* error = nullptr;
    mars_prompt prompt;
    mars_prompt_init(&prompt, sizeof prompt);
    const auto refused = [&](const mars_config* config) {
        const mars_status status = mars_generate(nullptr, &prompt, config, nullptr, nullptr, &completion, &error);
        return std::to_string(status) + " " + message_of(error);
    };
    CHECK(refused(nullptr) == "3 prompt: set exactly one of text, messages and token_ids");
    prompt.text = prompt.messages = "words";
    CHECK(refused(nullptr) == "3 prompt: set exactly one of text, messages and token_ids");
    prompt.text = nullptr;
    CHECK(refused(nullptr).find("2 messages must be a JSON list of {role, content}: ") == 0);
    for (const char* none : {"[]", "{}", "null", "7"}) {
        prompt.messages = none;
        CHECK(refused(nullptr) == "2 messages must be a JSON list of {role, content}, and not empty");
    }
    const std::string deep = std::string(400000, '[') + std::string(400000, ']');
    for (const std::string& hostile : {deep, std::string(400000, '{'), R"([{"role": "user", "content": )" + deep + "}]"}) {
        prompt.messages = hostile.c_str();
        CHECK(refused(nullptr) == "2 messages must be a JSON list of {role, content}: lists nested too deep");
    }
    prompt.messages = R"([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}])";
    CHECK(refused(nullptr) == "2 messages must be a JSON list of {role, content}; wrong: 1");
    prompt.messages = nullptr;
    prompt.text = "words";
    mars_config config;
    mars_config_init(&config, sizeof config);
    CHECK(config.tau == MARS_EXACT);
    CHECK(config.max_new_tokens == 256);
    config.metric = 7;
    CHECK(refused(&config) == "3 config: metric is not a mars_metric");
    mars_config_init(&config, sizeof config);
    config.num_stop = 1;
    CHECK(refused(&config) == "3 config: num_stop without stop");
    mars_config_init(&config, sizeof config);
    config.num_eos_ids = 1;
    CHECK(refused(&config) == "3 config: num_eos_ids without eos_ids");
}

TEST_CASE("settings of older and newer callers") {
    struct Newer {
        mars_config known;
        double unknown;
    } newer;
    mars_config_init(&newer.known, sizeof newer);
    CHECK_NOTHROW(mars::c::request_of(&newer.known)); // an unknown field that is 0
    newer.unknown = 1;
    CHECK_THROWS_WITH(mars::c::request_of(&newer.known), doctest::Contains("config: a setting that libmars "));
    newer.known.struct_size = 0;
    CHECK_THROWS_WITH(mars::c::request_of(&newer.known), "config: set struct_size to the size of the struct");
    // An older caller's struct is smaller: memory after it is not read.
    struct Older {
        size_t struct_size;
        double tau;
        double guard;
    } older{0, 0, 42};
    mars_config_init(reinterpret_cast<mars_config*>(&older), offsetof(Older, guard));
    CHECK(older.tau == MARS_EXACT);
    CHECK(older.guard == 42);
    CHECK(mars::c::request_of(reinterpret_cast<mars_config*>(&older)).config.max_new_tokens == 256);
}
