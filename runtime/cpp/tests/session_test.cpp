// Sessions and streams over a fake model: requests and their refusals, several threads, tau that changes on the way.
#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include <mars/batcher.hpp>
#include <mars/conversation.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "conformance.hpp"
#include "device/ort/backend.hpp"
#include "fake.hpp"
#include "joined.hpp"
#include "manifest.hpp"
#include "session/answers.hpp"
#include "small_tokenizer.hpp"

namespace {

constexpr std::int64_t context = 64;

mars::Session session(const fake::Predict& predict = fake::hashed) {
    mars::Bundle bundle{"nowhere", mars::parse_manifest(valid().dump())};
    return mars::Opened::over(std::move(bundle), std::make_unique<fake::Backend>(predict, context));
}

/// Every prediction is the number of known tokens, and sure.
std::pair<std::int64_t, float> counting(const fake::Tokens& known, std::int64_t masks) {
    return {3 + (static_cast<std::int64_t>(known.size()) + masks) % 10, 1.0F};
}

} // namespace

TEST_CASE("a completion equals the sum of its events") {
    const mars::Session opened = session();
    mars::GenerationConfig config = config_of(0.3, 20);
    config.eos_ids.reset(); // the model's own
    for (const std::int64_t cache_block : {1, 8}) {
        fake::Tokens seen;
        const auto done = opened.generate(
            fake::Tokens{4, 5}, config,
            [&](const mars::Event& event) {
                seen.insert(seen.end(), event.token_ids.begin(), event.token_ids.end());
                return false;
            },
            cache_block);
        CHECK(done.token_ids == seen);
        CHECK(done.confidences.size() == seen.size());
        CHECK(done.text.empty());
        CHECK(done.stats.tokens == static_cast<std::int64_t>(seen.size()));
        CHECK(done.token_ids == opened.generate(fake::Tokens{4, 5}, config).token_ids);
    }
}

TEST_CASE("tau 1 accepts one token a forward, tau 0 whole blocks") {
    const mars::Session opened = session(counting);
    CHECK(opened.generate(fake::Tokens{4}, config_of(1, 12)).stats.forwards == 12);
    CHECK(opened.generate(fake::Tokens{4}, config_of(0, 12)).stats.forwards == 3);
}

TEST_CASE("prompts from text, messages and token ids") {
    const auto kinds = [](const mars::Prompt& prompt) {
        return std::string(prompt.text() ? "t" : "") + (prompt.messages() ? "m" : "") + (prompt.token_ids() ? "i" : "");
    };
    CHECK(kinds("hi") == "t");
    CHECK(kinds({"hi"}) == "t");
    CHECK(kinds({}) == "t");
    CHECK(kinds(std::string("hi")) == "t");
    CHECK(kinds({{"user", "hi"}}) == "m");
    CHECK(kinds({{"system", "be brief"}, {"user", std::string("hi")}}) == "m");
    CHECK(kinds({1}) == "i");
    CHECK(kinds({1, 2}) == "i");
    CHECK(kinds(fake::Tokens{1, 2}) == "i");
    const mars::Prompt talk{{"system", "be brief"}, {"user", "hi"}};
    REQUIRE(talk.messages());
    CHECK(talk.messages()->at(1).content == "hi");
    const std::vector<mars::Prompt> several{"hi", {{"user", "hi"}}, {1, 2}};
    CHECK(kinds(several[0]) + kinds(several[1]) + kinds(several[2]) == "tmi");
    const mars::Session opened = session(counting);
    CHECK(opened.generate({4, 5}, config_of(1, 3)).token_ids == opened.generate(fake::Tokens{4, 5}, config_of(1, 3)).token_ids);
    CHECK_THROWS_WITH_AS(opened.generate({{"user", "hi"}}), doctest::Contains("no tokenizer"), mars::SessionError);
    CHECK_THROWS_WITH_AS(opened.stream({{"user", "hi"}}), doctest::Contains("no tokenizer"), mars::SessionError);
}

TEST_CASE("a prompt is measured before it is tokenized, in characters") {
    mars::Bundle bundle{"nowhere", mars::parse_manifest(valid().dump())};
    mars::Text text{
        mars::Tokenizer::from_json(small_tokenizer(no_split).dump()),
        mars::ChatTurns::from_json(R"({"between": {"start": {"user": ""}}, "after": {"user": ""}, "trimmed": [], "reserved": []})")};
    const mars::Session opened =
        mars::Opened::over(std::move(bundle), std::make_unique<fake::Backend>(fake::hashed, context), std::move(text));
    std::string wide; // of as many bytes, which are fewer characters
    for (int i = 0; i < 35'000; ++i) wide += "\xC3\xA9";
    for (const mars::Prompt& prompt :
         {mars::Prompt(std::string(70'000, 'a')), mars::Prompt({{"user", std::string(70'000, 'a')}}), mars::Prompt(wide)}) {
        std::string said, code, field;
        try {
            opened.encode(prompt);
        } catch (const mars::SessionError& error) {
            said = error.what(), code = error.code, field = error.field;
        }
        const bool is_short = prompt.text() != nullptr && *prompt.text() == wide;
        CHECK(mars::begins_with(said, is_short ? "the prompt has 35000 tokens"
                                               : "the prompt has 70000 characters, this bundle's context holds at most 65536"));
        CHECK(code == "context_length_exceeded");
        CHECK(field == "prompt");
    }
    mars::Conversation talk = opened.conversation();
    CHECK_THROWS_WITH_AS(talk.send(std::string(70'000, 'a'), {}), doctest::Contains("70000 characters"), mars::SessionError);
}

TEST_CASE("predictions that are not numbers fail the request") {
    const mars::Session opened =
        session([](const fake::Tokens&, std::int64_t) { return std::pair<std::int64_t, float>(3, std::nanf("")); });
    for (const std::optional<double>& tau : {std::optional<double>(), std::optional<double>(0.5), std::optional<double>(1.0)})
        CHECK_THROWS_WITH_AS(opened.generate(fake::Tokens{4}, config_of(tau, 5)), doctest::Contains("not numbers"), mars::DeviceError);
}

TEST_CASE("errors name the setting at fault") {
    const auto field_of = [](const std::function<void()>& call) {
        try {
            call();
        } catch (const mars::Error& error) {
            return std::string(error.code) + " " + error.field;
        }
        return std::string();
    };
    const mars::Session opened = session();
    mars::GenerationConfig config;
    config.top_p = 3;
    config.max_new_tokens = 0;
    CHECK(field_of([&] { opened.check(config); }) == "invalid_value max_new_tokens");
    config = {};
    config.temperature = 1;
    CHECK(field_of([&] { opened.check(config); }) == "unsupported_by_model temperature");
    config = {};
    config.stop = {"a"};
    CHECK(field_of([&] { opened.check(config); }) == "unsupported_by_model stop");
    mars::Limits limits;
    limits.max_stops = 1;
    config.stop = {"a", "b"};
    CHECK(field_of([&] { limits.check(config); }) == "limit_exceeded stop");
    CHECK(field_of([&] { opened.encode(fake::Tokens(100, 1)); }) == "context_length_exceeded prompt");
    CHECK(field_of([] { throw mars::MemoryError(""); }) == "out_of_memory ");
    CHECK(field_of([] { throw mars::Overloaded("", 1); }) == "overloaded ");
    CHECK(field_of([] { throw mars::DeviceLost(""); }) == "failed ");
}

TEST_CASE("a callback stops an answer, and its exception reaches the caller") {
    const mars::Session opened = session(counting);
    int calls = 0;
    const auto done = opened.generate(fake::Tokens{4}, config_of(1, 12), [&](const mars::Event&) { return ++calls == 3; });
    CHECK(done.finish_reason == mars::FinishReason::cancelled);
    CHECK(done.token_ids.size() == 3);
    CHECK_THROWS_AS(opened.generate(fake::Tokens{4}, config_of(1, 12), [](const mars::Event&) -> bool { throw std::out_of_range("mine"); }),
                    std::out_of_range);
}

TEST_CASE("rows of a batch are independent") {
    const mars::Session opened = session();
    const std::vector<mars::Prompt> prompts{fake::Tokens{1}, fake::Tokens(30, 2), fake::Tokens{3, 4}};
    const std::vector<mars::GenerationConfig> configs{config_of(0.2, 30), config_of(1, 50), config_of(0.6, 3)};
    const auto done = opened.generate_batch(prompts, configs);
    for (std::size_t i = 0; i < prompts.size(); ++i) CHECK(done[i].token_ids == opened.generate(prompts[i], configs[i]).token_ids);
    CHECK(opened.generate_batch({}, {}).empty());
    CHECK_THROWS_WITH_AS(opened.generate_batch(prompts, {config_of(1, 1)}), "3 prompts but 1 configs", mars::SessionError);
}

TEST_CASE("a stream's tau changes at the next step, and a stream outlives its session") {
    std::optional<mars::Stream> stream;
    {
        const mars::Session opened = session(counting);
        stream = opened.stream(fake::Tokens{4}, config_of(1, 40));
    }
    CHECK(stream->next()->token_ids.size() == 1);
    stream->set_tau(0.5);
    CHECK(stream->tau() == 0.5);
    CHECK(stream->next()->token_ids.size() == 4);
    stream->set_tau(1);
    CHECK(stream->next()->token_ids.size() == 1);
    CHECK_THROWS_AS(stream->set_tau(-0.1), mars::SessionError);
    stream->set_exact(true);
    CHECK(stream->exact());
    CHECK_FALSE(stream->tau());
    CHECK(stream->next()->token_ids.size() == 1); // nothing was proposed yet; masks are
    CHECK(stream->next()->token_ids.size() == 6);
    stream->set_exact(false);
    CHECK(stream->tau() == 0.95);
    stream->set_exact(false);
    stream->set_tau(0.5);
    stream->set_exact(false);
    CHECK(stream->tau() == 0.5);
    stream->cancel();
    CHECK_FALSE(stream->next());
    CHECK_FALSE(stream->next());
    CHECK(stream->completion().finish_reason == mars::FinishReason::cancelled);
    CHECK(stream->completion().token_ids.size() == 13);
}

TEST_CASE("a full context ends an answer and keeps its tokens") {
    const auto done = session(counting).generate(fake::Tokens(60, 3), config_of(0.5, 100));
    CHECK(done.finish_reason == mars::FinishReason::capacity);
    CHECK(done.token_ids.size() == 5); // the context's entries, and one prediction after the last
}

TEST_CASE("requests that cannot be served are errors with the reason") {
    const mars::Session opened = session();
    const auto refused = [&](const mars::Prompt& prompt, const mars::GenerationConfig& config, const std::string& part) {
        CHECK(says(message_of([&] { opened.generate(prompt, config); }), part));
    };
    mars::GenerationConfig sampled, margin, stopped;
    sampled.temperature = 1;
    margin.metric = mars::Metric::margin;
    stopped.stop = {"x"};
    refused(fake::Tokens{}, {}, "the prompt is empty");
    refused(fake::Tokens{1, -1, 20, 1LL << 40}, {}, "token ids outside the vocabulary of 20: -1, 20, 1099511627776");
    refused(fake::Tokens(65, 1), {}, "the prompt has 65 tokens, this bundle's context holds 64");
    refused(std::string("words"), {}, "no tokenizer; pass token ids");
    refused(std::vector<mars::Message>{{"user", "words"}}, {}, "no tokenizer; pass token ids");
    refused(fake::Tokens{1}, sampled, "need a bundle with logits");
    refused(fake::Tokens{1}, margin, "the metric margin needs a bundle exported with --metrics");
    refused(fake::Tokens{1}, stopped, "stop strings need a bundle with a tokenizer");
    refused(fake::Tokens{1}, config_of(-1, 0), "max_new_tokens must be");
    CHECK_THROWS_AS(opened.generate(fake::Tokens{1}, config_of(1, 1), nullptr, 0), mars::SessionError);
}

TEST_CASE("a failed step ends the stream with an error") {
    const mars::Session opened = session([](const fake::Tokens& known, std::int64_t masks) -> std::pair<std::int64_t, float> {
        if (known.size() > 5) throw mars::SessionError("the device is gone");
        return counting(known, masks);
    });
    mars::Stream stream = opened.stream(fake::Tokens{1, 2, 3}, config_of(1, 10));
    CHECK(stream.next());
    CHECK(stream.next());
    CHECK(stream.next());
    CHECK_THROWS_WITH_AS(stream.next(), "the device is gone", mars::SessionError);
    CHECK_FALSE(stream.next());
    CHECK(stream.completion().token_ids.size() == 3);
}

TEST_CASE("one session in many threads that also change running streams") {
    const mars::Session opened = session();
    const auto expected = opened.generate(fake::Tokens{7}, config_of(0.4, 30)).token_ids;
    std::atomic<int> equal{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
        threads.emplace_back([&] {
            for (int request = 0; request < 20; ++request)
                equal += opened.generate(fake::Tokens{7}, config_of(0.4, 30)).token_ids == expected;
            mars::Stream stream = opened.stream(fake::Tokens{7}, config_of(0.4, 50));
            std::thread hand([&] {
                for (int change = 0; change < 50; ++change) stream.set_tau(change % 2 == 0 ? 0.2 : 1.0);
                stream.cancel();
            });
            while (stream.next()) {
            }
            hand.join();
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(equal == 160);
}

TEST_CASE("a missing device is an error that lists the available ones") {
    const mars::Bundle bundle{"nowhere", mars::parse_manifest(valid().dump())};
    const mars::Variant& variant = bundle.manifest.variants.front();
    const std::string words = message_of([&] { mars::OrtBackend(bundle, variant, "abacus"); });
    CHECK(says(words, "has no device `abacus` (it has: "));
    CHECK(says(words, "CPUExecutionProvider"));
    CHECK_THROWS_AS(mars::OrtBackend(bundle, variant, "cpu", mars::OrtSettings{0}), mars::SessionError);
    CHECK_THROWS_AS(mars::OrtBackend(bundle, variant, "cpu", mars::OrtSettings{1}), mars::SessionError); // there is no such file
    CHECK(mars::OrtBackend::version().rfind("1.", 0) == 0);
}

TEST_CASE("a deadline ends its own row") {
    const mars::Session opened = session();
    mars::GenerationConfig late = config_of(1, 40);
    late.deadline = 1e-9;
    const auto done = opened.generate_batch({fake::Tokens{4}, fake::Tokens{5}}, {late, config_of(1, 6)});
    CHECK(done[0].finish_reason == mars::FinishReason::deadline);
    CHECK(done[0].token_ids.empty());
    CHECK(done[1].finish_reason == mars::FinishReason::length);
    CHECK(done[1].token_ids.size() == 6);
    late.deadline = 0.0;
    CHECK_THROWS_AS(opened.generate(fake::Tokens{4}, late), mars::SessionError);
}

TEST_CASE("costs can be set, and nothing is measured") {
    auto backend = std::make_unique<fake::Backend>(counting, context);
    fake::Backend& device = *backend;
    device.record = true;
    const mars::Session opened = mars::Opened::over({"nowhere", mars::parse_manifest(valid().dump())}, std::move(backend));
    opened.set_cost({{1, 1.0}, {8, 1.5}});
    CHECK(device.steps.empty());
    opened.warm_up();
    CHECK(device.steps.size() == 1);
    device.steps.clear();
    mars::GenerationConfig config = config_of(0.5, 4);
    config.masks = mars::auto_masks;
    opened.generate(fake::Tokens{4}, config);
    for (const mars::StepInput& step : device.steps) CHECK(step.input_ids.front() != fake::mask);
    CHECK_THROWS_AS(opened.set_cost({{8, 1.0}, {1, 1.0}}), mars::SessionError);
}

TEST_CASE("states of a row begin with a text, and move with the row") {
    mars::RecurrentInfo info{{2}, 1, 2, 2, 3, 1};
    mars::StateRows states(info, 3);
    const auto fill = [&](std::int64_t row, float value) {
        for (const auto& [suffix, buffer] : states.buffers) std::fill_n(buffer.at(row), buffer.size, value);
        states.lengths[static_cast<std::size_t>(row)] = 5;
    };
    for (std::int64_t row = 0; row < 3; ++row) fill(row, static_cast<float>(row + 1));
    CHECK(states.begin(1, {0, 7}) == std::vector<std::int64_t>{0, 5});
    CHECK(states.lengths[0] == 5);
    CHECK(!states.copy_bytes(2, 1000)); // its step has not ended
    states.lengths = {5, 1, 5};
    for (const auto& [suffix, size] : std::map<std::string, std::int64_t>{{"2.inputs", 3}, {"2.state", 4}}) { // what a first step reads
        const auto& buffer = states.buffers.at(suffix);
        CHECK(std::count(buffer.at(1), buffer.at(1) + size, 0.0F) == size);
        CHECK(std::count(buffer.at(0), buffer.at(1), 1.0F) == buffer.size);
        CHECK(std::count(buffer.at(2), buffer.at(3), 3.0F) == buffer.size);
    }
    states.move(2, 0);
    CHECK(states.lengths == std::vector<std::int64_t>{5, 1, 5});
    CHECK(*states.buffers.at("2.state").at(0) == 3.0F);
    CHECK(!states.copy_bytes(0, 4));
    CHECK(states.copy_bytes(0, 7) == 4 * (4 + (1 + 2) * 3));
    states.load(1, states.save(0, 7)); // with the inputs of the token before the state, and of two after it
    CHECK(states.lengths[1] == 5);
    const float* const inputs = states.buffers.at("2.inputs").at(1);
    CHECK(std::count(inputs, inputs + 9, 3.0F) == 9);
    CHECK(inputs[9] == 2.0F);
    CHECK(says(message_of([&] { mars::StateRows({{0, 1}, 65536, 65536, 65536, 1, 0}, 10000); }), "states of 10000 row(s) take"));
}
