// Rows that join and leave: tests/conformance/batcher.json exactly, the KV budget, and what one row's failure leaves of the others.
#include <limits>

#include <mars/errors.hpp>

#include "config.hpp"
#include "conformance.hpp"
#include "decode/prefix.hpp"
#include "failing.hpp"
#include "loops.hpp"
#include "small_tokenizer.hpp"
#include "structured/constrained_sequence.hpp"

namespace {

using Json = nlohmann::json;

std::shared_ptr<mars::Sequence> row_of(std::int64_t index, fake::Tokens prompt, const mars::GenerationConfig& config,
                                       std::function<bool(std::int64_t)> stop = nullptr) {
    return std::make_shared<mars::Sequence>(index, std::move(prompt), config, fake::Tokens{}, std::move(stop));
}

std::shared_ptr<mars::Sequence> row_of(std::int64_t index, const Json& wanted) {
    mars::GenerationConfig config = config_of(optional_of<double>(wanted["tau"]), wanted["max_new_tokens"]);
    if (wanted["masks"] != "full") config.masks = wanted["masks"];
    config.eos_ids = wanted["eos_ids"].get<fake::Tokens>();
    const auto stop = optional_of<std::int64_t>(wanted["stop_token"]);
    auto row = row_of(index, wanted["prompt"].get<fake::Tokens>(), config, [stop](std::int64_t token) { return token == stop; });
    row->client = optional_of<std::string>(wanted["client"]);
    return row;
}

mars::Schedule schedule_of(mars::Backend& backend, std::int64_t max_rows, std::int64_t prefill_tokens = 128) {
    return {backend, 4, fake::mask, loops::limits_of(max_rows, prefill_tokens)};
}

/// One step; adds what went wrong to `wrong`.
void step(mars::Schedule& schedule, std::vector<std::string>& wrong) {
    for (const mars::Accepted& each : loops::outcomes(schedule)) {
        if (!each.error) continue;
        try {
            std::rethrow_exception(each.error);
        } catch (const std::exception& error) {
            wrong.push_back(std::to_string(each.seq) + ": " + error.what());
        }
    }
}

/// Step until no row is left. Returns the errors.
std::vector<std::string> drained(mars::Schedule& schedule) {
    std::vector<std::string> wrong;
    for (int i = 0; !schedule.is_idle(); ++i) {
        REQUIRE(i < 10000);
        step(schedule, wrong);
    }
    return wrong;
}

fake::Tokens alone(const mars::Sequence& row) {
    fake::Backend backend;
    mars::Sequence own(0, {row.tokens.begin(), row.tokens.begin() + row.stats.prompt_tokens}, row.config(), {});
    const auto loop = loops::decode(backend, {&own}, 4, fake::mask);
    while (loop->next()) {
    }
    return own.tokens;
}

/// A row whose grammar wants any token, then `forced` of 3, then any tokens.
std::shared_ptr<mars::Sequence> constrained_sequence(std::int64_t number, std::int64_t forced, const mars::GenerationConfig& config) {
    static const auto bytes = std::make_shared<mars::Vocabulary>(mars::Tokenizer::from_json(small_tokenizer(no_split).dump()), 256);
    mars::Automaton automaton;
    for (std::int64_t state = 0; state < forced + 2; ++state) {
        const bool is_choice = state == 0 || state == forced + 1;
        automaton.first.push_back(static_cast<std::uint32_t>(state));
        automaton.target.push_back(static_cast<std::uint32_t>(std::min(state, forced) + 1));
        automaton.low.push_back(is_choice ? 0 : 3);
        automaton.high.push_back(is_choice ? 255 : 3);
        automaton.ends.push_back(false);
    }
    automaton.first.push_back(static_cast<std::uint32_t>(forced + 2));
    mars::GrammarState grammar_state(mars::Matcher(std::make_shared<mars::Walk>(std::move(automaton), bytes)), {}, false);
    return std::make_shared<mars::ConstrainedSequence>(number, fake::Tokens{7, 8}, config, fake::Tokens{}, std::move(grammar_state));
}

} // namespace

TEST_CASE("a long forced text is fed in pieces and delays no other row") {
    for (const std::int64_t guided : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}}) {
        fake::Backend backend;
        backend.record = true;
        mars::Schedule schedule = schedule_of(backend, 3, 16);
        std::vector<std::shared_ptr<mars::Sequence>> rows;
        for (std::int64_t i = 0; i < 3; ++i) {
            rows.push_back(i == guided ? constrained_sequence(i, 200, config_of(1.0, 240)) : row_of(i, {7, 8}, config_of(1.0, 240)));
            schedule.add(rows.back());
        }
        mars::Sequence& behind = *rows[static_cast<std::size_t>(guided)];
        while (behind.num_pending() < 100) loops::outcomes(schedule);
        for (std::int64_t last = behind.num_pending(); last > 16; last = behind.num_pending()) {
            std::vector<std::int64_t> before;
            for (const auto& row : rows) before.push_back(row->num_tokens());
            backend.steps.clear();
            loops::outcomes(schedule);
            for (std::size_t i = 0; i < rows.size(); ++i)
                CHECK((rows[i]->num_tokens() > before[i]) == (rows[i].get() != &behind || last <= 32));
            CHECK(std::count_if(backend.steps.begin(), backend.steps.end(), [](const auto& step) { return step.slots == 16; }) == 1);
        }
        CHECK(drained(schedule).empty());
        for (const auto& row : rows) {
            CHECK(row->finish_reason == mars::FinishReason::length);
            if (row.get() != &behind) CHECK(row->tokens == alone(*row));
        }
        const fake::Tokens text(behind.tokens.begin() + 3, behind.tokens.begin() + 203);
        CHECK(text == fake::Tokens(200, 3));
    }
}

TEST_CASE("a cancelled row stops in the middle of a forced text, in a batch and alone") {
    fake::Backend backend;
    backend.record = true;
    mars::Schedule schedule = schedule_of(backend, 3, 16);
    const auto row = constrained_sequence(0, 800, config_of(std::nullopt, 900));
    schedule.add(row);
    while (row->num_pending() < 100) loops::outcomes(schedule);
    backend.steps.clear();
    for (int i = 0; i < 3; ++i) CHECK(loops::outcomes(schedule).empty());
    CHECK(backend.steps.size() == 3);
    row->expire();
    loops::outcomes(schedule);
    CHECK(schedule.is_idle());
    CHECK(backend.steps.size() == 3);
    CHECK(row->finish_reason == mars::FinishReason::deadline);

    const auto guided = constrained_sequence(0, 800, config_of(std::nullopt, 900));
    mars::Sequence& other = *guided;
    const auto loop = loops::decode(backend, {&other}, 4, fake::mask);
    while (other.num_pending() < 100) REQUIRE(loop->next());
    backend.steps.clear();
    REQUIRE(loop->next());
    REQUIRE(loop->next());
    CHECK(backend.steps.size() == 2);
    other.cancel();
    CHECK(!loop->next());
    CHECK(backend.steps.size() == 2);
    CHECK(other.num_pending() > 100);
}

TEST_CASE("every case of batcher.json: what each row gets in which step") {
    for (const auto& each : conformance("batcher.json")) {
        CAPTURE(each["name"].get<std::string>());
        fake::Backend backend;
        mars::Limits limits = loops::limits_of(each["max_rows"], each["prefill_tokens"]);
        limits.max_rows_per_client = optional_of<std::int64_t>(each["max_rows_per_client"]);
        mars::Schedule schedule(backend, each["block"], fake::mask, limits);
        std::vector<std::shared_ptr<mars::Sequence>> rows;
        std::vector<Json> commits;
        for (const Json& wanted : each["rows"]) {
            rows.push_back(row_of(static_cast<std::int64_t>(rows.size()), wanted));
            commits.push_back(Json::array());
        }
        for (std::int64_t step = 0; step < each["steps"].get<std::int64_t>(); ++step) {
            for (std::size_t i = 0; i < rows.size(); ++i) {
                if (each["rows"][i]["arrives"] == step) schedule.add(rows[i]);
                if (each["rows"][i]["cancelled"] == step && !rows[i]->finish_reason) rows[i]->cancel();
            }
            for (const mars::Accepted& event : loops::outcomes(schedule)) {
                CHECK_FALSE(event.error);
                commits[static_cast<std::size_t>(event.seq)].push_back({step, event.token_ids});
            }
        }
        CHECK(schedule.is_idle());
        for (std::size_t i = 0; i < rows.size(); ++i) {
            CAPTURE(i);
            const Json& expected = each["rows"][i]["expected"];
            CHECK(commits[i] == expected["commits"]);
            REQUIRE(rows[i]->finish_reason);
            CHECK(to_string(*rows[i]->finish_reason) == expected["finish_reason"].get<std::string>());
        }
    }
}

TEST_CASE("a row that fails does not end others, and its entries, which may be NaN, are cleared") {
    struct Clearing : fake::Backend {
        std::unique_ptr<mars::Cache> new_cache(std::int64_t num_rows) override {
            struct Cleared : fake::Cache {
                Cleared(std::int64_t rows, fake::Tokens& to) : Cache(rows), cleared(to) {}
                void release(std::int64_t row) override { cleared.push_back(entries[static_cast<std::size_t>(row)].front()); }
                fake::Tokens& cleared;
            };
            return std::make_unique<Cleared>(num_rows, cleared);
        }
        fake::Tokens cleared; // the first tokens of these rows
    } backend;
    auto schedule = schedule_of(backend, 3);
    const auto good = row_of(0, {1, 2}, config_of(0.5, 30)), last = row_of(2, {3}, config_of({}, 30));
    const auto bad = row_of(1, {4, 5}, config_of(0.5, 30), [](std::int64_t) -> bool { throw std::runtime_error("a bad stop condition"); });
    for (const auto& row : {good, bad, last}) schedule.add(row);
    CHECK(drained(schedule) == std::vector<std::string>{"1: a bad stop condition"});
    CHECK(backend.cleared == fake::Tokens{4});
    CHECK(good->tokens == alone(*good));
    CHECK(last->tokens == alone(*last));
}

TEST_CASE("a device failure ends only the rows of that forward") {
    fake::Narrow backend;
    auto schedule = schedule_of(backend, 2);
    schedule.add(row_of(0, {1, 2}, config_of(0.5, 50)));
    loops::outcomes(schedule);
    backend.broken = true;
    CHECK(drained(schedule) == std::vector<std::string>{"0: the device is gone"});
    backend.broken = false;
    const auto later = row_of(1, {7, 7}, config_of({}, 20));
    schedule.add(later);
    CHECK(drained(schedule).empty());
    CHECK(later->tokens == alone(*later));
}

TEST_CASE("a failed copy ends only its row, whichever copy it is") {
    std::int64_t failing = 1;
    for (bool is_last = false; !is_last; ++failing) {
        CAPTURE(failing);
        fake::Losing backend(failing);
        mars::PrefixCache store(1 << 20, 1);
        auto schedule = schedule_of(backend, 5, 16);
        std::vector<std::shared_ptr<mars::Sequence>> rows;
        const auto add = [&](std::int64_t length, std::int64_t max_new_tokens) {
            const auto index = static_cast<std::int64_t>(rows.size());
            rows.push_back(row_of(index, fake::Tokens(static_cast<std::size_t>(length), 1 + index), config_of(0.5, max_new_tokens)));
            rows.back()->prefix_handle = store.handle();
            schedule.add(rows.back());
        };
        for (const std::int64_t length : {3, 300, 60}) add(length, 5 + length % 7);
        std::vector<std::string> wrong;
        for (int i = 0; i < 4; ++i) step(schedule, wrong);
        for (const std::int64_t length : {20, 5, 40, 2}) add(length, 5 + length % 9); // in front of the one that is being read
        while (!schedule.is_idle()) step(schedule, wrong);
        is_last = backend.num_copies < failing; // none failed
        CHECK(wrong.size() == (is_last ? 0 : 1));
        for (const auto& row : rows) {
            const bool is_lost = !wrong.empty() && wrong.front() == std::to_string(row->index) + ": no memory for a copy";
            CHECK(row->finish_reason == (is_lost ? mars::FinishReason::cancelled : mars::FinishReason::length));
            if (!is_lost) CHECK(row->tokens == alone(*row));
        }
        add(30, 5);
        CHECK(drained(schedule).empty());
        CHECK(rows.back()->tokens == alone(*rows.back()));
    }
    CHECK(failing > 10);
}

TEST_CASE("a prompt may be read in one step, whatever its number of pieces") {
    fake::Backend backend;
    auto schedule = schedule_of(backend, 2, std::numeric_limits<std::int64_t>::max());
    const auto one = row_of(0, fake::Tokens(300, 2), config_of(1.0, 5)), other = row_of(1, {3}, config_of(1.0, 5));
    for (const auto& row : {one, other}) schedule.add(row);
    CHECK(drained(schedule).empty());
    CHECK(one->stats.prefill_forwards == 0);
}

TEST_CASE("a lack of memory for a prompt ends that request only") {
    fake::Narrow backend;
    backend.most = 100;
    auto schedule = schedule_of(backend, 3, 16);
    const auto small = row_of(0, {1, 2}, config_of(1.0, 30)), other = row_of(2, {3, 1}, config_of(1.0, 30));
    schedule.add(small);
    loops::outcomes(schedule);
    schedule.add(row_of(1, fake::Tokens(200, 5), config_of(1.0, 5)));
    schedule.add(other);
    CHECK(drained(schedule) == std::vector<std::string>{"1: no memory for 96 entries"});
    CHECK(small->tokens == alone(*small));
    CHECK(other->tokens == alone(*other));
}

TEST_CASE("a KV budget counts what a row may take") {
    const auto small = row_of(0, fake::Tokens(20, 1), config_of(1.0, 20)), large = row_of(1, fake::Tokens(600, 2), config_of(1.0, 20));
    const auto unlimited = row_of(2, {1}, config_of(1.0, std::numeric_limits<std::int64_t>::max()));
    const mars::KvBudget host{4, 8 * 256 * 4, 8, 1000}, fixed{4, 16000, 8, 1000, true}; // entries of 8 bytes: four rows of 256
    CHECK(host.entries(*small) == 104);
    CHECK(host.entries(*unlimited) == 1064);
    CHECK(host.num_entries() == 1024);
    CHECK(host.row_entries() == 1024);
    CHECK(host.half_share() == 128);
    CHECK(host.left({small.get(), large.get()}) == 1024 - 104 - 684);
    CHECK(!host.max_entries());
    CHECK(fixed.entries(*small) == 1000);
    const mars::KvBudget device{4, 8 * 256 * 4, 8, 1000, false, false}; // equal shares
    CHECK(device.entries(*small) == 256);
    CHECK(device.row_entries() == 256);
    CHECK(device.max_entries() == 256);
    CHECK(!device.left({large.get()}));
    CHECK_THROWS_AS(device.check(*large), mars::SessionError);
    host.check(*large);
}

TEST_CASE("rows start by their own entries, and one that waits for memory is passed 4 x max_rows times") {
    constexpr std::int64_t most = 8, entries = 8 * 1024;
    fake::Backend backend(fake::hashed, 2 * entries);
    mars::Schedule schedule(backend, 4, fake::mask, loops::limits_of(most), std::nullopt, mars::KvBudget{most, entries, 1, 2 * entries});
    std::vector<std::shared_ptr<mars::Sequence>> all;
    const auto add = [&](std::int64_t tokens, const char* client = nullptr) {
        all.push_back(row_of(static_cast<std::int64_t>(all.size()), fake::Tokens(4, 1), config_of(1.0, tokens)));
        if (client != nullptr) all.back()->client = client;
        schedule.add(all.back());
        return all.back().get();
    };
    const auto until = [&](const std::function<bool()>& is_over) {
        for (int i = 0; !is_over(); ++i) {
            REQUIRE(i < 20000);
            loops::outcomes(schedule);
            CHECK(schedule.num_running() <= most);
        }
    };
    const auto num_begun = [&] { return std::count_if(all.begin(), all.end(), [](const auto& row) { return row->stats.tokens > 0; }); };
    const mars::Sequence* const beside = add(3000);
    for (int i = 0; i < 30; ++i) add(100);
    loops::outcomes(schedule);
    CHECK(schedule.num_running() == most);
    until([&] { return schedule.num_running() == 1 && schedule.num_waiting() == 0; });
    CHECK(!beside->finish_reason);
    CHECK(num_begun() == 31);
    const mars::Sequence* const large = add(6000); // waits for the first one's memory
    loops::outcomes(schedule);
    CHECK(schedule.num_rows() == 1);
    for (int i = 0; i < 100; ++i) add(100);
    loops::outcomes(schedule);
    CHECK(schedule.num_running() == most);
    until([&] { return large->stats.tokens > 0; });
    CHECK(large->num_passes <= 4 * most);
    CHECK(num_begun() >= 32 + 4 * most);
    CHECK(num_begun() < 32 + 5 * most);
    until([&] { return schedule.is_idle(); });
    CHECK(schedule.num_rows() == most);
    for (const auto& row : all) CHECK(row->finish_reason == mars::FinishReason::length);
    CHECK(all[5]->tokens == alone(*all[5]));
    const std::vector<const mars::Sequence*> longs{add(100, "a"), add(7000, "a"), add(7000, "b")};
    for (int i = 0; i < 300; ++i) add(50, i % 2 == 0 ? "a" : "b");
    until([&] { return std::all_of(longs.begin(), longs.end(), [](const auto* row) { return row->finish_reason; }); });
    for (const auto* row : longs) CHECK(row->num_passes <= 4 * most);
}

TEST_CASE("capacity shrinks when only short rows are left, and a row that cannot grow ends alone") {
    fake::Narrow backend;
    auto schedule = schedule_of(backend, 4);
    const auto small = row_of(0, fake::Tokens(4, 1), config_of(1.0, 500)), large = row_of(1, fake::Tokens(6000, 1), config_of(1.0, 1));
    for (const auto& row : {small, large}) schedule.add(row);
    CHECK(drained(schedule).empty());
    CHECK(backend.smallest <= 1024);
    CHECK(small->tokens == alone(*small));
    backend.most_entries = 128;
    std::vector<std::shared_ptr<mars::Sequence>> rows{row_of(0, fake::Tokens(60, 1), config_of(1.0, 300))};
    for (std::int64_t i = 1; i < 4; ++i) rows.push_back(row_of(i, fake::Tokens(10, 1 + i), config_of(1.0, 90)));
    for (const auto& row : rows) schedule.add(row);
    CHECK(drained(schedule) == std::vector<std::string>{"0: no memory"});
    CHECK(rows[0]->num_tokens() >= 128);
    for (std::size_t i = 1; i < rows.size(); ++i) CHECK(rows[i]->tokens == alone(*rows[i]));
}

TEST_CASE("a row with many pending tokens is read in parts that the KV budget counts on") {
    fake::Backend backend;
    backend.record = true;
    mars::Schedule schedule(backend, 4, fake::mask, loops::limits_of(2), std::nullopt, mars::KvBudget{2, 8 * 512 * 2, 8, 10000});
    const auto one = row_of(0, {1}, config_of(1.0, 200)), other = row_of(1, {2}, config_of(1.0, 200));
    for (const auto& row : {one, other}) schedule.add(row);
    while (one->stats.tokens < 60) loops::outcomes(schedule);
    one->tokens.insert(one->tokens.end(), 120, 1); // as a grammar that forces a long text
    one->stats.tokens += 120;
    CHECK(drained(schedule).empty());
    for (const mars::StepInput& step : backend.steps) CHECK(step.slots <= 64);
}

TEST_CASE("cached prefixes are not read again, and a long one does not exceed the KV budget") {
    fake::Backend backend(fake::hashed, 2000);
    mars::PrefixCache store(1 << 20, 1);
    const fake::Tokens opening(300, 4);
    const auto asked = [&](std::int64_t index, fake::Tokens prompt) {
        auto row = row_of(index, std::move(prompt), config_of(1.0, 4));
        row->prefix_handle = store.handle();
        return row;
    };
    auto schedule = schedule_of(backend, 3);
    fake::Tokens longer = opening;
    longer.push_back(9);
    const auto first = asked(0, opening), second = asked(1, longer);
    for (const auto& row : {first, second}) {
        schedule.add(row);
        CHECK(drained(schedule).empty());
        CHECK(row->tokens == alone(*row));
    }
    CHECK(first->stats.cached_tokens == 0);
    CHECK(second->stats.cached_tokens == 300); // all but its last
    mars::Schedule narrow(backend, 4, fake::mask, loops::limits_of(2), std::nullopt, mars::KvBudget{2, 8 * 2 * 256, 8, 2000, false, false});
    const auto small = asked(2, {4, 4, 4, 4, 8});
    narrow.add(small);
    CHECK(drained(narrow).empty());
    CHECK(small->stats.cached_tokens == 0);
    CHECK(small->tokens == alone(*small));
}
