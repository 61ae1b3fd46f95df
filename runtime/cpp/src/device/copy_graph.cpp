// Fields of ModelProto, GraphProto, NodeProto and ValueInfoProto. Twin of `copies` in runtime/device/ort_memory.py.
#include "device/copy_graph.hpp"

#include <cstdint>
#include <string_view>

namespace mars {

namespace {

constexpr int type_int64 = 7;
constexpr std::uint64_t opset = 24, ir_version = 11;

std::string varint(std::uint64_t value) {
    std::string bytes;
    for (; value > 0x7F; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
    return bytes + static_cast<char>(value);
}

std::string number(std::uint64_t field, std::uint64_t value) { return varint(field << 3) + varint(value); }

std::string part(std::uint64_t field, std::string_view value) { return varint(field << 3 | 2) + varint(value.size()) + std::string(value); }

/// A tensor of `rank` unknown sizes.
std::string value_info(std::uint64_t field, const std::string& name, int element_type, int rank) {
    std::string shape;
    for (int i = 0; i < rank; ++i) shape += part(1, "");
    const std::string tensor = number(1, static_cast<std::uint64_t>(element_type)) + part(2, shape);
    return part(field, part(1, name) + part(2, part(1, tensor)));
}

} // namespace

std::string copy_graph(CopyKind kind, std::size_t count, int element_type) {
    const bool is_pad = kind == CopyKind::pad;
    const std::string operation = is_pad ? "Pad" : "Identity";
    const int rank = is_pad ? 2 : 1;
    std::string nodes, inputs = is_pad ? value_info(11, "shared", type_int64, 1) : "", outputs;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string in = "in" + std::to_string(i), out = "out" + std::to_string(i);
        nodes += part(1, part(1, in) + (is_pad ? part(1, "shared") : "") + part(2, out) + part(4, operation));
        inputs += value_info(11, in, element_type, rank);
        outputs += value_info(12, out, element_type, rank);
    }
    const std::string graph = nodes + part(2, operation) + inputs + outputs;
    return number(1, ir_version) + part(7, graph) + part(8, part(1, "") + number(2, opset));
}

} // namespace mars
