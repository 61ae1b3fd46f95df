// Stored grammars: tests/conformance/grammar.json exactly, sessions that follow one, and invalid files.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "conformance.hpp"
#include "loops.hpp"
#include "manifest.hpp"
#include "scripted.hpp"
#include "session/answers.hpp"
#include "structured/automaton.hpp"
#include "structured/constrained_sequence.hpp"

namespace {

using Json = nlohmann::json;

using scripted::config_of;
using scripted::kept;
using Scripted = scripted::Model;

std::string hex(const mars::TokenSet& set) {
    std::string text;
    for (std::int64_t byte = 0; byte < (set.size() + 7) / 8; ++byte) {
        unsigned value = 0;
        for (std::int64_t bit = 0; bit < 8; ++bit) value |= (set.has(8 * byte + bit) ? 1U : 0U) << bit;
        text += "0123456789abcdef"[value >> 4U];
        text += "0123456789abcdef"[value & 15U];
    }
    return text;
}

/// A directory with the automata, and a bundle of it for a fake model.
struct KeptGrammars {
    KeptGrammars() {
        std::string name = (std::filesystem::temp_directory_path() / "mars-grammar-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path = name;
        Json manifest = valid();
        manifest["model"]["vocab_size"] = kept().vocabulary->size();
        manifest["model"]["context_length"] = 512;
        manifest["tokens"] = {{"mask", 0}, {"eos", {kept().end}}, {"pad", 0}};
        for (std::size_t i = 0; i < kept().json["files"].size(); ++i) {
            const std::string file = "grammar-000000000000000" + std::to_string(i) + ".dfa";
            std::ofstream(path / file, std::ios::binary) << kept().content(i);
            manifest["files"].push_back({{"path", file}, {"size", kept().content(i).size()}, {"sha256", "a"}});
            manifest["grammars"].push_back({{"name", "g" + std::to_string(i)}, {"file", file}, {"kind", "schema"}, {"states", 2}});
        }
        bundle = {path, mars::parse_manifest(manifest.dump())};
    }
    ~KeptGrammars() { std::filesystem::remove_all(path); }

    mars::Session session(const Json& wanted) const {
        auto model = std::make_unique<Scripted>(wanted["script"].get<fake::Tokens>(), wanted);
        return mars::Opened::over(bundle, std::move(model), mars::Text{kept().tokenizer, mars::ChatTurns::from_json("null")});
    }

    std::filesystem::path path;
    mars::Bundle bundle;
};

} // namespace

TEST_CASE("every state of grammar.json: the same masks, ends, forced tokens and top-k choices") {
    for (std::size_t number = 0; number < kept().json["files"].size(); ++number) {
        const auto walk = kept().walk(number);
        for (const Json& state : kept().json["files"][number]["states"]) {
            CAPTURE(kept().json["files"][number]["name"].get<std::string>());
            CAPTURE(state["tokens"].dump());
            mars::Matcher matcher(walk);
            for (const std::int64_t token : state["tokens"]) matcher.consume(token);
            CHECK(matcher.forced() == state["forced"].get<fake::Tokens>());
            CHECK(matcher.may_end() == state["may_end"].get<bool>());
            if (!state.contains("mask")) continue;
            CHECK(hex(matcher.mask()) == state["mask"].get<std::string>());
            const auto likely = matcher.likely();
            CHECK(likely.has_value() == !state["likely"].is_null());
            if (likely && !state["likely"].is_null()) {
                CHECK(likely->first == state["likely"][0].get<std::int64_t>());
                CHECK(likely->second == doctest::Approx(state["likely"][1].get<double>()));
            }
        }
    }
}

TEST_CASE("every answer of grammar.json: the same accepted runs, feeds and counts") {
    for (const Json& wanted : kept().json["answers"]) {
        CAPTURE(wanted["name"].get<std::string>());
        Scripted model(wanted["script"].get<fake::Tokens>(), wanted);
        mars::GrammarState grammar_state(mars::Matcher(kept().walk(wanted["grammar"])), {kept().end}, wanted["logits"].get<bool>(),
                                         wanted["block"].get<std::int64_t>() - 1);
        mars::ConstrainedSequence row(0, kept().prompt, config_of(wanted), {kept().end}, std::move(grammar_state));
        const Json& expected = wanted["expected"];
        std::vector<fake::Tokens> runs, fed;
        const std::string error = message_of([&] {
            const auto loop = loops::decode(model, {&row}, wanted["block"], fake::mask);
            while (const auto accepted = loop->next())
                for (const mars::Accepted& event : *accepted) runs.push_back(event.token_ids);
        });
        for (const mars::StepInput& step : model.plain.steps) {
            const std::int64_t known = step.output_index.front() + 1;
            const auto masks = std::count(step.input_ids.begin(), step.input_ids.end(), fake::mask);
            fed.push_back({known, step.slots - known - masks, masks});
        }
        CHECK(error == (expected["error"].is_null() ? "" : expected["error"].get<std::string>()));
        CHECK(runs == expected["runs"].get<std::vector<fake::Tokens>>());
        CHECK(fed == expected["fed"].get<std::vector<fake::Tokens>>());
        CHECK(row.stats.forced == expected["forced"].get<std::int64_t>());
        CHECK(row.stats.draft_tokens == expected["draft_tokens"].get<std::int64_t>());
        CHECK(row.stats.accepted_draft_tokens == expected["accepted_draft_tokens"].get<std::int64_t>());
        CHECK(row.stats.forwards == expected["forwards"].get<std::int64_t>());
        if (error.empty()) CHECK(to_string(*row.finish_reason) == expected["finish_reason"].get<std::string>());
    }
}

TEST_CASE("answers follow the grammar of their request, alone and in a batch") {
    const KeptGrammars directory;
    std::vector<mars::Prompt> prompts;
    std::vector<mars::GenerationConfig> configs;
    const Json* last = nullptr;
    for (const Json& wanted : kept().json["answers"]) {
        // The cost of a step is not measured for fixed numbers of masks, so the steps are those of the file.
        if (!wanted["expected"]["error"].is_null() || wanted["max_slots"] != Json() || wanted["block"] != 4 || wanted["seed"] == 0)
            continue;
        mars::GenerationConfig config = config_of(wanted);
        config.grammar = "g" + std::to_string(wanted["grammar"].get<int>());
        const mars::Completion done = directory.session(wanted).generate(kept().prompt, config);
        fake::Tokens answer;
        for (const Json& run : wanted["expected"]["runs"])
            for (const Json& token : run) answer.push_back(token);
        CHECK(done.token_ids == answer);
        CHECK(done.stats.forced == wanted["expected"]["forced"].get<std::int64_t>());
        mars::Batcher batcher(directory.session(wanted));
        mars::Request request = batcher.submit(kept().prompt, config);
        std::int64_t num_forced = 0;
        while (const auto event = request.next()) num_forced += static_cast<std::int64_t>(event->forced.size());
        CHECK(num_forced == request.completion().stats.forced);
        last = &wanted;
        config.tau = 1.0;
        config.prompt_lookup = 0;
        prompts.emplace_back(kept().prompt);
        configs.push_back(config);
    }
    REQUIRE(last != nullptr);
    configs.emplace_back(); // and one without a grammar
    configs.back().max_new_tokens = 9;
    configs.back().masks = mars::all_masks;
    prompts.emplace_back(kept().prompt);
    const mars::Session session = directory.session(*last);
    const auto together = session.generate_batch(prompts, configs);
    for (std::size_t i = 0; i < configs.size(); ++i) CHECK(together[i].token_ids == session.generate(prompts[i], configs[i]).token_ids);
    CHECK(together.back().stats.forced == 0);
}

TEST_CASE("a grammar that a session cannot follow is refused before the first step") {
    const KeptGrammars directory;
    Json wanted = kept().json["answers"][0];
    mars::GenerationConfig config;
    config.masks = mars::all_masks;
    config.grammar = "tols";
    const auto error = [&] { return message_of([&] { directory.session(wanted).generate(kept().prompt, config); }); };
    CHECK(error().find("no grammar `tols` (there are: g0, g1, g2, g3, g4, g5)") != std::string::npos);
    config.grammar = "g0";
    wanted["top_k"] = 0;
    wanted["logits"] = false;
    CHECK(error().find("logits or with --top-k 16") != std::string::npos);
    config.grammar = "g5"; // one text: nothing is ever chosen
    CHECK(directory.session(wanted).generate(kept().prompt, config).text == "there is only this answer, {}");
    std::ofstream(directory.path / "grammar-0000000000000005.dfa") << "nonsense";
    CHECK(error().find("not the automaton of a grammar") != std::string::npos);
    std::filesystem::remove(directory.path / "grammar-0000000000000005.dfa");
    CHECK(error().find("not readable") != std::string::npos);
}

TEST_CASE("a grammar's file must be listed") {
    Json manifest = valid();
    manifest["files"].push_back({{"path", "grammar-00000000000000aa.dfa"}, {"size", 1}, {"sha256", "a"}});
    manifest["grammars"] = {{{"name", "g"}, {"file", "grammar-00000000000000aa.dfa"}, {"kind", "regex"}, {"states", 1}}};
    CHECK(mars::parse_manifest(manifest.dump()).grammars.front().name == "g");
    manifest["grammars"][0]["file"] = "grammar-0123456789abcdef.dfa";
    CHECK(message_of([&] { mars::parse_manifest(manifest.dump()); }).find("does not list") != std::string::npos);
}

TEST_CASE("invalid automaton files are refused") {
    const std::string good = kept().content(3);
    const auto changed = [&](std::size_t at, const std::string& bytes) {
        std::string content = good;
        return content.replace(at, bytes.size(), bytes);
    };
    const std::string huge("\xFF\xFF\xFF\x7F", 4), zero(4, '\0');
    const auto error = [](const std::string& content) { return message_of([&] { mars::parse_automaton(content, "it"); }); };
    CHECK(error(good).empty());
    CHECK(error("").find("not the automaton") != std::string::npos);
    CHECK(error(changed(0, "X")).find("not the automaton") != std::string::npos);
    CHECK(error(changed(7, "\x02")).find("version 2") != std::string::npos);
    CHECK(error(changed(8, huge)).find("more than") != std::string::npos); // 2^31 - 1 states
    CHECK(error(changed(8, zero)).find("or none") != std::string::npos);
    CHECK(error(changed(12, huge)).find("more than") != std::string::npos);
    CHECK(error(changed(16, huge)).find("are not in order") != std::string::npos);
    for (std::size_t size = 16; size < good.size(); ++size) CHECK(error(good.substr(0, size)).find("bytes are not") != std::string::npos);
    CHECK(error(good + "x").find("bytes are not") != std::string::npos);
    // Two states that lead to one another and never end.
    const auto number = [](unsigned value) { return std::string{static_cast<char>(value), 0, 0, 0}; };
    const std::string head = std::string("MARSDFA\x01") + number(2) + number(2) + number(0) + number(1) + number(2);
    CHECK(error(head + number(1) + number(0) + "aa" + "aa" + std::string(1, '\0')).find("no answer can end") != std::string::npos);
    CHECK(error(head + number(1) + number(0) + "aa" + "aa" + "\x02").empty());
    CHECK(error(head + number(2) + number(0) + "aa" + "aa" + "\x02").find("leads nowhere") != std::string::npos);
    CHECK(error(head + number(1) + number(0) + "ba" + "aa" + "\x02").find("not in order") != std::string::npos);
    CHECK(error(head + number(1) + number(0) + "aa" + "aa" + "\x06").find("end that is not a state") != std::string::npos);
    // Any byte may be anything: an error, or an automaton that can be walked.
    for (std::size_t at = 8; at < good.size(); ++at)
        for (const char byte : {'\0', '\x01', '\x7F', '\xFF'}) {
            const std::string content = changed(at, std::string(1, byte));
            if (!error(content).empty()) continue;
            const auto walk = std::make_shared<mars::Walk>(mars::parse_automaton(content, "it"), kept().vocabulary);
            mars::Matcher matcher(walk);
            for (int i = 0; i < 40 && !matcher.is_over(); ++i) {
                fake::Tokens next = matcher.forced();
                for (std::int64_t token = 0; next.empty() && token < kept().vocabulary->size(); ++token)
                    if (matcher.mask().has(token)) next = {token};
                for (const std::int64_t token : next) matcher.consume(token);
            }
        }
}

TEST_CASE("masks of a large vocabulary take bounded memory") {
    for (const std::int64_t vocab_size : {1, 288, 32'000, 152'000, 1'000'000'000}) {
        const auto masks = static_cast<std::int64_t>(mars::Walk::most_masks(vocab_size));
        CHECK(masks >= 1);
        CHECK(masks <= 4096);
        CHECK((masks == 1 || masks * (vocab_size / 8) <= 8 << 20));
    }
}

TEST_CASE("a state without a possible token is an error") {
    const auto few = std::make_shared<mars::Vocabulary>(kept().tokenizer, 20); // no letters
    const auto walk = std::make_shared<mars::Walk>(mars::parse_automaton(kept().content(3), "it"), few);
    CHECK(message_of([&] { mars::Matcher(walk).mask(); }).find("nothing that is allowed so far can be continued") != std::string::npos);
    CHECK_THROWS_AS(mars::Matcher(walk).consume(39999), mars::SessionError);
    CHECK_THROWS_AS(mars::Matcher(walk).consume(5), mars::SessionError);
}
