// Draft slots: their ids, rows that feed them, and what a session with draft adapters or without masks accepts.
#include <mars/batcher.hpp>
#include <mars/errors.hpp>

#include "config.hpp"
#include "conformance.hpp"
#include "fake.hpp"
#include "loops.hpp"
#include "manifest.hpp"
#include "session/answers.hpp"

namespace {

using fake::Tokens;
using Json = nlohmann::json;

constexpr std::int64_t vocab = 50, low = 3, high = 41;

mars::DraftSlots slots_of(std::int64_t adapter) { return mars::DraftSlots::of(adapter, vocab, low, high); }

/// A fake model that has checked the ids of draft slots, and sees masks there. `owners`: the adapters of its rows.
class Drafting : public fake::Backend {
  public:
    explicit Drafting(Tokens adapters, std::int64_t max_capacity = 1000)
        : Backend(fake::hashed, max_capacity), owners(std::move(adapters)) {}

    void step(mars::Cache& cache, std::int64_t first, const mars::StepInput& input, bool wanted, mars::StepOutput& output) override {
        mars::StepInput plain = input;
        for (std::int64_t i = 0; i < input.rows; ++i)
            for (std::int64_t j = 0; j < input.slots; ++j) {
                std::int64_t& id = plain.input_ids[static_cast<std::size_t>(i * input.slots + j)];
                const std::int64_t position = input.kv_length[static_cast<std::size_t>(i)] + j;
                if (id < vocab) continue;
                if (id != slots_of(owners[static_cast<std::size_t>(first + i)]).ids(position, 1).front())
                    throw std::logic_error("another draft id");
                fed.push_back(id % vocab);
                id = fake::mask;
            }
        Backend::step(cache, first, plain, wanted, output);
    }

    const Tokens owners;
    Tokens fed;
};

Json drafted() {
    Json manifest = valid();
    manifest["model"]["vocab_size"] = vocab;
    manifest["tokens"]["mask"] = nullptr;
    manifest["masks"] = 3;
    manifest["draft"] = {{"adapters", {"one", "two"}}, {"low", low}, {"high", high}};
    return manifest;
}

mars::Session session(const Json& manifest, std::unique_ptr<mars::Backend> backend) {
    mars::Session opened = mars::Opened::over({"nowhere", mars::parse_manifest(manifest.dump())}, std::move(backend));
    opened.set_cost({{1, 1.0}});
    return opened;
}

} // namespace

TEST_CASE("every case of drafts.json") {
    for (const Json& each : conformance("drafts.json")) {
        CAPTURE(each.dump());
        const std::int64_t adapter = each["adapter"], size = each["vocab_size"], position = each["position"];
        const auto slots = mars::DraftSlots::of(adapter, size, each["low"], each["high"]);
        CHECK(slots.ids(position, each["count"]) == each["ids"].get<Tokens>());
    }
}

TEST_CASE("each row feeds the ids of its adapter by position and gives the one-token text") {
    for (const Tokens& owners : {Tokens{0}, Tokens{1, 0, 2}})
        for (const std::optional<double> tau : {std::optional(1.0), std::optional<double>()}) {
            Drafting backend(owners);
            fake::Backend plain;
            std::vector<std::unique_ptr<mars::Sequence>> rows, expected;
            std::vector<mars::Sequence*> active, alone;
            for (std::size_t i = 0; i < owners.size(); ++i) {
                const Tokens prompt{4, 1, 1 + static_cast<std::int64_t>(i)};
                rows.push_back(std::make_unique<mars::Sequence>(static_cast<std::int64_t>(i), prompt, config_of(tau), Tokens{}));
                rows.back()->draft_slots = slots_of(owners[i]);
                expected.push_back(std::make_unique<mars::Sequence>(static_cast<std::int64_t>(i), prompt, config_of(1.0), Tokens{}));
                active.push_back(rows.back().get());
                alone.push_back(expected.back().get());
            }
            for (const auto loop = loops::decode(backend, active, 4, vocab + low); loop->next();) {
            }
            for (const auto loop = loops::decode(plain, alone, 4, fake::mask); loop->next();) {
            }
            for (std::size_t i = 0; i < rows.size(); ++i) CHECK(rows[i]->tokens == expected[i]->tokens);
            CHECK(backend.fed.empty() == tau.has_value());
            for (const std::int64_t id : backend.fed) CHECK((id >= low && id < high));
        }
}

TEST_CASE("no step has more masks than the bundle allows") {
    for (const std::int64_t most : {0, 1, 3}) {
        fake::Backend backend;
        backend.record = true;
        mars::Sequence row(0, {4, 1}, config_of({}), {});
        row.mask_limit = most;
        for (const auto loop = loops::decode(backend, {&row}, 4, fake::mask); loop->next();) {
        }
        std::int64_t masks = 0;
        for (const mars::StepInput& step : backend.steps)
            masks = std::max<std::int64_t>(masks, std::count(step.input_ids.begin(), step.input_ids.end(), fake::mask));
        CHECK(masks == most);
    }
}

TEST_CASE("a session with draft adapters: a request chooses one, and a tau is refused") {
    const mars::Session first = session(drafted(), std::make_unique<Drafting>(Tokens{0})),
                        second = session(drafted(), std::make_unique<Drafting>(Tokens{1}));
    CHECK(first.info().draft_adapters == std::vector<std::string>{"one", "two"});
    CHECK(first.info().mask_id == -1);
    mars::GenerationConfig config = config_of({}, 12), two = config, other = config;
    two.draft = "two";
    other.draft = "three";
    const Tokens text = first.generate(Tokens{4, 19, 5}, config).token_ids; // no token is the mask
    CHECK(text == first.generate(Tokens{4, 19, 5}, config_of(1.0, 12)).token_ids);
    CHECK(text == second.generate(Tokens{4, 19, 5}, two).token_ids);
    CHECK(message_of([&] { first.check(other); }) == "this bundle has no draft adapter 'three'; it has one, two");
    CHECK(says(message_of([&] { first.check(config_of(0.9)); }), "trained to be verified"));
    mars::GenerationConfig entropy = config_of(0.0);
    entropy.metric = mars::Metric::entropy;
    CHECK_FALSE(says(message_of([&] { first.check(entropy); }), "trained to be verified")); // one token a step
    CHECK(says(message_of([&] { first.generate(Tokens{vocab}, config); }), "token ids outside the vocabulary of 50: 50"));

    mars::Stream stream = first.stream(Tokens{4}, config);
    mars::Batcher batcher(first);
    mars::Request request = batcher.submit(Tokens{4}, config);
    CHECK(says(message_of([&] { stream.set_tau(0.5); }), "trained to be verified"));
    CHECK(says(message_of([&] { stream.set_exact(false); }), "trained to be verified"));
    CHECK(says(message_of([&] { request.set_tau(0.5); }), "trained to be verified"));
    CHECK(stream.exact());
    stream.set_tau(1.0);
    CHECK(stream.tau() == 1.0);
}

TEST_CASE("a bundle without masks: exact mode with lookup, and every token is allowed in a prompt") {
    Json manifest = valid();
    manifest["tokens"]["mask"] = nullptr;
    manifest["masks"] = 0;
    const auto repeating = [](const Tokens& known, std::int64_t masks) {
        return std::pair(masks > 0 ? std::int64_t{13} : 3 + known.back() % 5, 0.5F);
    };
    const mars::Session opened = session(manifest, std::make_unique<fake::Backend>(repeating, 64));
    mars::GenerationConfig exact = config_of({}), looking = exact, named = exact;
    looking.prompt_lookup = 1;
    named.draft = "one";
    const mars::Completion one = opened.generate(Tokens{4, 19}, config_of(1.0)), plain = opened.generate(Tokens{4, 19}, exact),
                           copied = opened.generate(Tokens{4, 19}, looking);
    CHECK(plain.token_ids == one.token_ids);
    CHECK(copied.token_ids == one.token_ids);
    CHECK(plain.stats.forwards == one.stats.forwards);
    CHECK(copied.stats.forwards < one.stats.forwards);
    CHECK(says(message_of([&] { opened.check(named); }), "has no draft adapter 'one'; it has none"));
    CHECK(says(message_of([&] { opened.check(config_of(0.5)); }), "exported without masks"));
}

TEST_CASE("invalid draft adapters in a manifest are refused") {
    const auto problem = [](const char* pointer, const Json& value) {
        Json manifest = drafted();
        manifest[Json::json_pointer(pointer)] = value;
        return message_of([&] { mars::parse_manifest(manifest.dump()); });
    };
    CHECK(problem("/masks", nullptr).empty());
    CHECK(says(problem("/masks", 4097), "masks: an integer of 0 to 4096"));
    CHECK(says(problem("/tokens/mask", 7), "tokens.mask: null is expected in a bundle with draft adapters"));
    CHECK(says(problem("/draft", nullptr), "tokens.mask: null needs draft adapters, or masks 0"));
    CHECK(says(problem("/draft/adapters", Json::array()), "draft.adapters: at least one name is expected"));
    CHECK(says(problem("/draft/low", high), "draft.high: more than low, 41, is expected, not 41"));
    CHECK(says(problem("/draft/high", vocab + 1), "draft.high: an integer of 1 to 50"));
}
