// runtime/structured/stored_grammars.py: the file of a stored grammar, a deterministic automaton (docs/format.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mars {

struct Bundle;

/// States are numbered from 0, the start. The edges of state s are first[s] ... first[s + 1] - 1, in the order of their
/// bytes.
struct Automaton {
    std::vector<std::uint32_t> first, target;
    std::vector<unsigned char> low, high; ///< an edge's bytes, both included
    std::vector<bool> ends;               ///< states in which an answer may end

    static constexpr std::int32_t none = -1;

    std::int32_t size() const { return static_cast<std::int32_t>(ends.size()); }
    bool is_end(std::int32_t state) const { return ends[static_cast<std::size_t>(state)]; }
    std::int32_t step(std::int32_t state, unsigned char byte) const;

    /// The state after all these bytes, or none.
    std::int32_t walk(std::string_view data, std::int32_t state) const;

    /// The only edge of a state; no value if there is a choice, or an answer may end.
    std::optional<std::uint32_t> only(std::int32_t state) const;
};

/// Read a bundle's file. Throws BundleError if it cannot be read or is not a valid automaton.
Automaton read_automaton(const Bundle& bundle, const std::string& file);

/// Parse the content of a file, which may be hostile. Throws BundleError; `where` names the file.
Automaton parse_automaton(std::string_view content, const std::string& where);

} // namespace mars
