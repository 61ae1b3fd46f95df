// Saved prefixes: what a hit restores is what reading the prompt gives, and memory stays under the budget.
#include <random>

#include "config.hpp"
#include "conformance.hpp"
#include "decode/prefix.hpp"
#include "fake.hpp"
#include "loops.hpp"

namespace {

using fake::Tokens;
using mars::PrefixCache;

constexpr std::int64_t plenty = std::int64_t{1} << 30, block = 4;
const mars::Group group{"", 1};

struct Spoken {
    Tokens tokens;
    mars::FinishReason reason;
    mars::Stats stats;
};

/// Prompts in one batch, with access to `store` if it is given.
std::vector<Spoken> spoken(mars::Backend& backend, PrefixCache* store, const std::vector<std::pair<Tokens, mars::GenerationConfig>>& jobs,
                           std::vector<std::int64_t> marks = {}, std::int64_t cache_block = 1) {
    std::vector<std::unique_ptr<mars::Sequence>> rows;
    std::vector<mars::Sequence*> pointers;
    for (const auto& [ids, config] : jobs) {
        rows.push_back(std::make_unique<mars::Sequence>(static_cast<std::int64_t>(rows.size()), ids, config, Tokens{}));
        if (store != nullptr) rows.back()->prefix_handle = store->handle(config.cache_salt, marks);
        pointers.push_back(rows.back().get());
    }
    const auto loop = loops::decode(backend, pointers, block, fake::mask, cache_block);
    while (loop->next()) {
    }
    std::vector<Spoken> said;
    for (const auto& row : rows) said.push_back({row->tokens, row->finish_reason.value(), row->stats});
    return said;
}

Tokens joined(Tokens ids, const Tokens& more) {
    ids.insert(ids.end(), more.begin(), more.end());
    return ids;
}

const Tokens opening = [] {
    Tokens ids;
    for (std::int64_t i = 0; i < 40; ++i) ids.push_back(1 + i % 7);
    return ids;
}();

} // namespace

TEST_CASE("a failed copy is counted and changes nothing else, an entry without room is not copied") {
    PrefixCache store(40, 1);
    store.save(group, {1, 2}, 16, []() -> std::shared_ptr<const mars::Saved> { throw std::bad_alloc(); });
    CHECK(store.stats().failed == 1);
    CHECK(store.stats().num_bytes == 0);
    store.save(group, Tokens(6, 5), 48, []() -> std::shared_ptr<const mars::Saved> { throw std::logic_error("there is no room"); });
    CHECK(store.stats().failed == 1);
    store.save(group, Tokens(5, 5), 40, [] { return std::make_shared<fake::Saved>(Tokens(5, 5)); });
    CHECK(store.match(group, Tokens(7, 5))->length == 5);
    store.clear();
    CHECK(store.stats().num_bytes == 0);
}

TEST_CASE("conversations give the same text with a prefix cache, whatever is final and however prompts are read") {
    std::mt19937 draw(11);
    const auto pick = [&](std::uint32_t most) { return static_cast<std::int64_t>(draw() % most); };
    std::int64_t hits = 0;
    for (int round = 0; round < 300; ++round) {
        const std::optional<std::int64_t> reproducible = round % 4 == 0 ? std::nullopt : std::optional<std::int64_t>(round % 4);
        const std::int64_t piece = 2 * block + pick(12), budget = round % 3 == 0 ? 200 : round % 3 == 1 ? 600 : plenty;
        const std::int64_t cache_block = round % 5 == 0 ? 1 + pick(5) : 1;
        PrefixCache store(budget, reproducible);
        std::vector<Tokens> histories{{1, 2, 1, 2, 3, 3, 1, 1, 2}};
        for (int turn = 0; turn < 6; ++turn) {
            std::vector<std::pair<Tokens, mars::GenerationConfig>> jobs;
            for (std::int64_t i = 0; i <= pick(3); ++i) {
                Tokens ids = histories[static_cast<std::size_t>(pick(static_cast<std::uint32_t>(histories.size())))];
                if (pick(2) == 0) ids.resize(std::max(std::size_t{1}, ids.size() - static_cast<std::size_t>(pick(5))));
                for (std::int64_t more = 1 + pick(12); more > 0; --more) ids.push_back(1 + pick(3));
                const std::optional<double> taus[] = {std::nullopt, std::nullopt, 0.5, 1.0};
                // A small step has less room for masks the more it reads, so that at a tau its text depends on where reading began.
                const auto tau = taus[pick(4)];
                mars::GenerationConfig config = config_of(reproducible && tau == 0.5 ? std::nullopt : tau, 1 + pick(14));
                if (pick(4) == 0) config.cache_salt = "b";
                jobs.emplace_back(std::move(ids), std::move(config));
            }
            fake::Backend with(fake::hashed, 1000000, piece), without(fake::hashed, 1000000, piece);
            with.reproducible = reproducible;
            const auto one = spoken(with, &store, jobs, {9}, cache_block), other = spoken(without, nullptr, jobs, {}, cache_block);
            for (std::size_t i = 0; i < jobs.size(); ++i) {
                CHECK(one[i].tokens == other[i].tokens);
                CHECK(one[i].reason == other[i].reason);
                CHECK(one[i].stats.cached_tokens < one[i].stats.prompt_tokens);
                if (!reproducible) CHECK(one[i].stats.cached_tokens % piece == 0);
                CHECK(one[i].stats.prefill_forwards <= other[i].stats.prefill_forwards);
                histories.push_back(one[i].tokens);
            }
            CHECK(store.stats().num_bytes <= budget);
        }
        CHECK(store.stats().failed == 0);
        hits += store.stats().hit_tokens;
    }
    CHECK(hits > 10000);
}

TEST_CASE("a system prompt is read once for ten requests, and a second turn reads only new tokens") {
    PrefixCache store(plenty, 1);
    fake::Backend backend(fake::hashed, 1000000, 64);
    std::vector<std::pair<Tokens, mars::GenerationConfig>> jobs;
    for (std::int64_t i = 0; i < 10; ++i) jobs.emplace_back(joined(opening, {8, i + 1, 9}), config_of({}, 4));
    const auto rows = spoken(backend, &store, jobs);
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(rows[i].stats.cached_tokens == (i == 0 ? 0 : 41));
    CHECK(store.stats().queries == 10);
    CHECK(store.stats().hits == 9);
    CHECK(store.stats().query_tokens == 430);
    CHECK(store.stats().hit_tokens == 9 * 41);
    const Tokens first = spoken(backend, &store, {{opening, config_of({}, 12)}})[0].tokens;
    const auto second = spoken(backend, &store, {{joined(first, {5, 6, 7}), config_of({}, 4)}})[0];
    // All but the last accepted tokens, which no step had fed yet.
    CHECK(second.stats.cached_tokens >= static_cast<std::int64_t>(first.size()) - block - 2);
    CHECK(second.stats.cached_tokens < static_cast<std::int64_t>(first.size()));
}

TEST_CASE("entries are not shared across salts, piece sizes that change them, or steps whose width changes them") {
    PrefixCache store(plenty, 1);
    fake::Backend backend(fake::hashed, 1000000, 16);
    for (const auto& [salt, cached] : {std::pair<const char*, std::int64_t>{"", 0}, {"a", 0}, {"b", 0}, {"a", 39}}) {
        mars::GenerationConfig config = config_of({}, 4);
        config.cache_salt = salt;
        CHECK(spoken(backend, &store, {{opening, config}})[0].stats.cached_tokens == cached);
    }
    PrefixCache by_piece(plenty, std::nullopt);
    for (const auto& [piece, cached] : {std::pair<std::int64_t, std::int64_t>{8, 0}, {16, 0}, {8, 32}, {16, 32}, {10, 0}}) {
        fake::Backend strict(fake::hashed, 1000000, piece);
        strict.reproducible = std::nullopt;
        CHECK(spoken(strict, &by_piece, {{opening, config_of({}, 4)}})[0].stats.cached_tokens == cached);
    }
    PrefixCache two(plenty, 2);
    backend.reproducible = 2;
    const Tokens first = spoken(backend, &two, {{opening, config_of(1.0, 12)}})[0].tokens;
    CHECK(spoken(backend, &two, {{joined(first, {5, 6}), config_of({}, 4)}})[0].stats.cached_tokens ==
          static_cast<std::int64_t>(opening.size()));
}

TEST_CASE("a cancelled row saves its final entries, a failed one no further ones") {
    for (const bool fails : {false, true}) {
        PrefixCache store(plenty, 1);
        int left = fails ? 3 : 1000;
        fake::Backend backend(
            [&left](const Tokens& known, std::int64_t masks) {
                if (known.size() > opening.size() && --left <= 0) throw std::runtime_error("the device is gone");
                return fake::hashed(known, masks);
            },
            1000000, 8);
        mars::Sequence row(0, opening, config_of({}, 50), {});
        row.prefix_handle = store.handle();
        const auto loop = loops::decode(backend, {&row}, block, fake::mask);
        if (fails) {
            CHECK_THROWS_AS(([&] {
                                while (loop->next()) {
                                }
                            }()),
                            std::runtime_error);
        } else {
            for (int i = 0; i < 3; ++i) loop->next(); // in the middle of its prompt
            row.cancel();
            CHECK(!loop->next());
        }
        fake::Backend good(fake::hashed, 1000000, 8), fresh(fake::hashed, 1000000, 8);
        const auto again = spoken(good, &store, {{opening, config_of({}, 30)}})[0];
        CHECK(again.stats.cached_tokens == (fails ? 39 : 24));
        CHECK(again.tokens == spoken(fresh, nullptr, {{opening, config_of({}, 30)}})[0].tokens);
    }
}

TEST_CASE("every request of prefix.json finds and saves the expected entries") {
    for (const auto& each : conformance("prefix.json")) {
        CAPTURE(each["name"].get<std::string>());
        if (each.contains("stored") && !each["stored"].empty()) continue; // prefixes of a bundle
        const auto entry_bytes = each["entry_bytes"].get<std::int64_t>();
        struct Small : fake::Cache {
            explicit Small(std::int64_t num_bytes) : fake::Cache(1), own_bytes(num_bytes) {}
            std::int64_t entry_bytes() const override { return own_bytes; }
            std::int64_t own_bytes;
        };
        const auto reproducible = optional_of<std::int64_t>(each["reproducible_slots"]);
        PrefixCache store(each["budget"], reproducible);
        const auto& requests = each["requests"];
        std::vector<Tokens> whole;
        for (const auto& request : requests) {
            const Tokens prompt = request["prompt"].get<Tokens>();
            whole.push_back(joined(prompt, request["answer"].get<Tokens>()));
            const Tokens& tokens = whole.back();
            Small cache(entry_bytes);
            const std::int64_t hits = store.stats().hits;
            const auto prefix_handle = store.handle(request["salt"], request["marks"].get<Tokens>());
            std::int64_t cursor = prefix_handle->lookup(cache, 0, prompt, request["piece"], 1000000), num_reproducible = cursor;
            CHECK(cursor == request["cached"].get<std::int64_t>());
            CHECK((store.stats().hits > hits) == (cursor > 0));
            if (cursor > 0) CHECK(std::equal(prompt.begin(), prompt.begin() + cursor, cache.entries[0].begin()));
            const auto step = [&](std::int64_t slots, std::int64_t moved, bool is_piece) {
                cache.reserve(cursor + slots, {cursor});
                std::copy_n(tokens.begin() + cursor, moved, cache.entries[0].begin() + cursor);
                if (cursor == num_reproducible && (reproducible ? slots >= *reproducible : is_piece)) num_reproducible += moved;
                cursor += moved;
            };
            for (const auto& read : request["reads"]) step(read[0], read[1], read[2]);
            prefix_handle->store(cache, 0, prompt, num_reproducible);
            for (const auto& more : request["steps"]) step(more[0], more[1], false);
            if (!request["steps"].empty()) prefix_handle->store(cache, 0, tokens, num_reproducible);
            std::vector<std::tuple<mars::Group, Tokens, bool>> wanted;
            std::int64_t num_tokens = 0;
            for (const auto& entry : request["entries"]) {
                const auto& of = requests[entry[0].get<std::size_t>()];
                const std::int64_t of_piece = reproducible ? 1 : of["piece"].get<std::int64_t>();
                const Tokens& ids = whole[entry[0].get<std::size_t>()];
                const auto length = entry[1].get<std::int64_t>();
                num_tokens += length;
                wanted.emplace_back(mars::Group{of["salt"], of_piece}, Tokens(ids.begin(), ids.begin() + length), entry[2].get<bool>());
            }
            CHECK(store.held() == wanted);
            CHECK(store.stats().evicted == request["evicted"].get<std::int64_t>());
            CHECK(store.stats().saved == request["saved"].get<std::int64_t>());
            CHECK(store.stats().num_bytes == entry_bytes * num_tokens);
        }
    }
}
