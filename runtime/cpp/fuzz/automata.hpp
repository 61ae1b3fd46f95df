// Valid and invalid automaton files (docs/format.md, "Grammars").
#pragma once

#include <string>
#include <vector>

namespace automata {

struct Edge {
    int low, high;
    std::size_t target;
};

struct State {
    bool is_end = false;
    std::vector<Edge> edges = {};
};

inline std::string number(std::size_t value) {
    std::string bytes;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFU);
    return bytes;
}

inline std::string file(const std::vector<State>& states) {
    std::string first = number(0), target, low, high, ends((states.size() + 7) / 8, '\0');
    for (std::size_t i = 0; i < states.size(); ++i) {
        if (states[i].is_end) ends[i / 8] = static_cast<char>(static_cast<unsigned char>(ends[i / 8]) | 1U << i % 8);
        for (const Edge& edge : states[i].edges) {
            low += static_cast<char>(edge.low);
            high += static_cast<char>(edge.high);
            target += number(edge.target);
        }
        first += number(low.size());
    }
    return "MARSDFA\x01" + number(states.size()) + number(low.size()) + first + target + low + high + ends;
}

} // namespace automata
