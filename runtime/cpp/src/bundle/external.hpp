// The files that an ONNX graph takes its tensors from, whether it has inner graphs, and lists so long that loading it would take all memory:
// read from the protobuf itself. Knows no operator.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace mars {

/// `names`: the files of its external data. `is_nested`: it has loops, branches or functions, whose work its size does not tell.
/// `longest`: integers of its longest list of 64-bit ones, which may become a shape.
struct Contents {
    std::set<std::string> names;
    bool is_nested = false;
    std::uint64_t longest = 0;
};

/// Integers in a row that are taken: as a shape ONNX Runtime takes 1.5 KB for each when it loads a graph.
constexpr std::uint64_t most_in_a_row = 65536;

/// Nothing for what is no ONNX graph.
std::optional<Contents> graph_contents(std::string_view data);

} // namespace mars
