// Fuzzes grammar automata: any bytes are refused, or walked in every way an answer may go. Half of the inputs describe
// an automaton, so that most of those are valid.
#include "structured/automaton.hpp"

#include <memory>

#include <mars/errors.hpp>

#include "../tests/small_tokenizer.hpp"
#include "automata.hpp"
#include "fuzz.hpp"
#include "structured/grammar.hpp"

namespace {

using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t vocab_size = 266; // one more than the tokenizer knows

std::shared_ptr<const mars::Vocabulary> vocabulary() {
    static const auto all = std::make_shared<mars::Vocabulary>(mars::Tokenizer::from_json(small_tokenizer(no_split).dump()), vocab_size);
    return all;
}

/// An automaton file described by the input: for each state whether it is an end, and its edges, each a gap, a width
/// and a target.
std::string written(Bytes& given) {
    std::vector<automata::State> states(1 + given.below(60));
    for (std::size_t i = 0; i < states.size(); ++i) {
        const std::uint8_t about = given.byte();
        states[i].is_end = about % 4 == 0;
        int next = 0;
        for (int edge = about / 4 % 4; edge > 0 && next < 256; --edge) {
            const std::uint8_t kind = given.byte();
            const int low = std::min(255, next + (next == 0 ? given.byte() : kind % 8)),
                      high = std::min(255, low + (kind < 192 ? 0 : kind % 64));
            states[i].edges.push_back({low, high, kind % 2 == 0 ? (i + 1) % states.size() : given.below(states.size())});
            next = high + 1;
        }
    }
    return automata::file(states);
}

/// One of the tokens that may follow.
std::int64_t drawn(const mars::TokenSet& mask, std::size_t number) {
    Tokens all;
    for (std::int64_t token = 0; token < vocab_size; ++token)
        if (mask.has(token)) all.push_back(token);
    return all.empty() ? -1 : all[number % all.size()];
}

void check(mars::Walk& walk) {
    const mars::Automaton& automaton = walk.automaton();
    for (std::int32_t state = 0; state < std::min(automaton.size(), 200); ++state) {
        for (int byte = 0; byte < 256; ++byte) {
            const std::int32_t behind = automaton.step(state, static_cast<unsigned char>(byte));
            require(behind == mars::Automaton::none || (behind >= 0 && behind < automaton.size()), "an edge leads to a state");
        }
        if (const auto edge = automaton.only(state))
            require(automaton.low.at(*edge) == automaton.high.at(*edge) && !automaton.is_end(state), "what must follow is one byte");
    }
}

/// An answer under the grammar, and another with the same beginning. Every byte is a token here, so none gets stuck.
void follow(const std::shared_ptr<mars::Walk>& walk, Bytes& given) {
    mars::Matcher matcher(walk);
    for (int step = 0; step < 40; ++step) {
        const mars::TokenSet mask = matcher.mask();
        const Tokens forced = matcher.forced();
        const bool is_over = matcher.is_over();
        if (const auto likely = matcher.likely()) {
            require(matcher.mask().has(likely->first), "what is likely is allowed");
            require(likely->second >= 0 && likely->second <= 1, "a share is one");
        }
        if (!is_over) require(mask.any() || !forced.empty() || matcher.may_end(), "an answer goes on or ends");
        if (is_over) return;
        for (const std::int64_t token : forced) matcher.consume(token);
        if (!forced.empty()) continue;
        const std::int64_t token = drawn(matcher.mask(), given.byte());
        if (token < 0) return;
        mars::Matcher other = matcher;
        matcher.consume(token);
        other.consume(token);
        require(other.forced() == matcher.forced() && other.may_end() == matcher.may_end(), "a copy goes the same way");
    }
    for (const std::int64_t token : {std::int64_t{-1}, std::int64_t{264}, vocab_size, std::int64_t{1} << 40}) try {
            mars::Matcher(matcher).consume(token);
            require(false, "tokens without bytes are not allowed");
        } catch (const mars::SessionError&) {
        }
}

} // namespace

std::vector<std::string> seeds() {
    using automata::file;
    const std::vector<automata::State> pairs = {{false, {{'a', 'a', 1}}}, {false, {{'b', 'b', 2}}}, {true, {{'a', 'a', 1}}}},
                                       wide = {{false, {{0, '9', 1}, {'a', 255, 1}}}, {true, {}}}, endless = {{false, {{'a', 'a', 0}}}};
    std::vector<automata::State> chain(901); // the same byte, nine hundred times
    for (std::size_t i = 0; i < 900; ++i) chain[i].edges = {{'a', 'a', i + 1}};
    chain[900].is_end = true;
    std::vector<std::string> made;
    for (const auto& states : {pairs, wide, endless, chain}) made.push_back('\0' + file(states));
    made.push_back(made.front() + "more");
    std::string random(1, '\1');
    for (unsigned i = 0, value = 7; i < 5000; ++i) random += static_cast<char>((value = value * 1103515245 + 12345) >> 16U & 0xFFU);
    made.push_back(random);
    for (int i = 1; i < 20; ++i) made.push_back('\1' + random.substr(static_cast<std::size_t>(200 * i), 180));
    return made;
}

/// The first byte decides whether the rest is a file or describes one.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes given(data, size);
    const std::string content = given.byte() % 2 == 0 ? std::string(given.rest()) : written(given);
    try {
        const auto walk = std::make_shared<mars::Walk>(mars::parse_automaton(content, "it"), vocabulary());
        check(*walk);
        mars::leaves_a_choice(mars::Matcher(walk));
        for (int i = 0; i < 3; ++i) follow(walk, given);
    } catch (const mars::BundleError&) {
    }
    return 0;
}
