// The files that an ONNX graph takes its tensors from, and whether it has inner graphs: read from the protobuf itself. Knows no operator.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace mars {

/// `names`: the files of its external data. `is_nested`: it has loops, branches or functions, whose work its size does not tell.
struct Contents {
    std::set<std::string> names;
    bool is_nested = false;
};

/// Nothing for what is no ONNX graph.
std::optional<Contents> graph_contents(std::string_view data);

} // namespace mars
