#include "structured/automaton.hpp"

#include <algorithm>
#include <cstring>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"

namespace mars {

namespace {

constexpr std::string_view magic = "MARSDFA";
constexpr unsigned char table_version = 1;
constexpr std::uint64_t max_states = 1U << 17U, most_edges = 1U << 20U, header = 16;

std::vector<std::uint32_t> numbers(std::string_view data) {
    std::vector<std::uint32_t> all(data.size() / 4);
    if (!all.empty()) std::memcpy(all.data(), data.data(), data.size()); // little-endian, as all processors that are supported
    return all;
}

bool ends_everywhere(const Automaton& automaton) {
    const auto size = static_cast<std::size_t>(automaton.size());
    std::vector<std::vector<std::uint32_t>> sources(size);
    for (std::uint32_t state = 0; state < size; ++state)
        for (std::uint32_t edge = automaton.first[state]; edge < automaton.first[state + 1]; ++edge)
            sources[automaton.target[edge]].push_back(state);
    std::vector<std::uint32_t> todo;
    std::vector<bool> good = automaton.ends;
    for (std::uint32_t state = 0; state < size; ++state)
        if (good[state]) todo.push_back(state);
    std::size_t count = todo.size();
    while (!todo.empty()) {
        const std::uint32_t state = todo.back();
        todo.pop_back();
        for (const std::uint32_t source : sources[state]) {
            if (good[source]) continue;
            good[source] = true;
            todo.push_back(source);
            ++count;
        }
    }
    return count == size;
}

} // namespace

std::int32_t Automaton::step(std::int32_t state, unsigned char byte) const {
    const auto begin = high.begin() + first[static_cast<std::size_t>(state)];
    const auto end = high.begin() + first[static_cast<std::size_t>(state) + 1];
    const auto at = std::lower_bound(begin, end, byte);
    if (at == end) return none;
    const auto edge = static_cast<std::size_t>(at - high.begin());
    return low[edge] <= byte ? static_cast<std::int32_t>(target[edge]) : none;
}

std::int32_t Automaton::walk(std::string_view data, std::int32_t state) const {
    for (const char byte : data) {
        state = step(state, static_cast<unsigned char>(byte));
        if (state == none) return none;
    }
    return state;
}

std::optional<std::uint32_t> Automaton::only(std::int32_t state) const {
    const std::uint32_t edge = first[static_cast<std::size_t>(state)];
    if (is_end(state) || first[static_cast<std::size_t>(state) + 1] != edge + 1 || low[edge] != high[edge]) return std::nullopt;
    return edge;
}

Automaton read_automaton(const Bundle& bundle, const std::string& file) {
    constexpr std::size_t limit = header + 4 * (max_states + 1) + 6 * most_edges + max_states / 8 + 1;
    const std::filesystem::path path = bundle.path / file;
    const std::optional<std::string> content = read_file(path, limit);
    if (!content) throw BundleError(path.string() + ": not readable; copy or export the bundle again");
    return parse_automaton(*content, path.string());
}

Automaton parse_automaton(std::string_view content, const std::string& where) {
    const auto fail = [&](const std::string& what) {
        throw BundleError(where + ": " + what + "; compile the grammar again with `mars-export grammar`");
    };
    if (content.size() < header || content.substr(0, magic.size()) != magic) fail("not the automaton of a grammar");
    if (const auto file_version = static_cast<unsigned char>(content[magic.size()]); file_version != table_version)
        fail("written as version " + std::to_string(file_version) + ", this runtime reads " + std::to_string(table_version));
    const std::size_t states = numbers(content.substr(8, 4)).front(), edges = numbers(content.substr(12, 4)).front();
    const std::string sizes = std::to_string(states) + " states and " + std::to_string(edges) + " edges";
    if (states < 1 || states > max_states || edges > most_edges)
        fail(sizes + ", more than " + std::to_string(max_states) + " and " + std::to_string(most_edges) + ", or none");
    if (content.size() != header + 4 * (states + 1) + 6 * edges + (states + 7) / 8)
        fail(std::to_string(content.size()) + " bytes are not " + sizes);
    Automaton automaton;
    content.remove_prefix(header);
    const auto take = [&](std::size_t num_bytes) {
        const std::string_view part = content.substr(0, num_bytes);
        content.remove_prefix(num_bytes);
        return part;
    };
    automaton.first = numbers(take(4 * (states + 1)));
    automaton.target = numbers(take(4 * edges));
    const std::string_view low = take(edges), high = take(edges);
    automaton.low.assign(low.begin(), low.end());
    automaton.high.assign(high.begin(), high.end());
    if (automaton.first.front() != 0 || automaton.first.back() != edges || !std::is_sorted(automaton.first.begin(), automaton.first.end()))
        fail("the edges of its states are not in order");
    for (std::size_t state = 0; state < states; ++state)
        for (std::size_t edge = automaton.first[state]; edge < automaton.first[state + 1]; ++edge)
            if (automaton.target[edge] >= states || automaton.low[edge] > automaton.high[edge] ||
                (edge > automaton.first[state] && automaton.low[edge] <= automaton.high[edge - 1]))
                fail("an edge leads nowhere, or bytes are not in order");
    for (std::size_t i = 0; i < 8 * ((states + 7) / 8); ++i) {
        const bool is_set = (static_cast<unsigned char>(content[i / 8]) >> (i % 8) & 1U) != 0;
        if (i < states)
            automaton.ends.push_back(is_set);
        else if (is_set)
            fail("an end that is not a state");
    }
    if (!ends_everywhere(automaton)) fail("there are states from which no answer can end");
    return automaton;
}

} // namespace mars
