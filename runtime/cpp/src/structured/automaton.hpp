// The file of a stored grammar: a deterministic automaton over bytes, as docs/format.md says. Knows no tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mars {

struct Bundle;

/// States from 0, where it begins. The edges of state s are first[s] ... first[s + 1] - 1, in the order of their bytes.
struct Automaton {
    std::vector<std::uint32_t> first, target;
    std::vector<unsigned char> low, high; ///< an edge's bytes, both included
    std::vector<bool> ends;               ///< where an answer may end

    static constexpr std::int32_t none = -1;

    std::int32_t size() const { return static_cast<std::int32_t>(ends.size()); }
    bool is_end(std::int32_t state) const { return ends[static_cast<std::size_t>(state)]; }

    /// The state behind a byte, or none.
    std::int32_t step(std::int32_t state, unsigned char byte) const;

    /// The state behind all these bytes, or none.
    std::int32_t walk(std::string_view data, std::int32_t state) const;

    /// The one edge that must be taken; nothing where there is a choice, or an end.
    std::optional<std::uint32_t> only(std::int32_t state) const;
};

/// Of a bundle's file, as it was when the bundle was opened. Throws BundleError for one that cannot be read, or is no automaton.
Automaton read_automaton(const Bundle& bundle, const std::string& file);

/// The automaton in the content of a file, in which nothing is trusted. Throws BundleError.
Automaton parse_automaton(std::string_view content, const std::string& where);

} // namespace mars
