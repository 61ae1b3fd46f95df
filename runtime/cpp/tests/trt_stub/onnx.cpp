// Protobuf's wire format, field by field.
#include "onnx.hpp"

#include <functional>
#include <stdexcept>
#include <string_view>

namespace stub {

namespace {

std::uint64_t varint(std::string_view& data) {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (data.empty()) break;
        const auto byte = static_cast<unsigned char>(data.front());
        data.remove_prefix(1);
        value |= std::uint64_t{byte & 0x7FU} << shift;
        if (byte < 0x80) return value;
    }
    throw std::runtime_error("not an ONNX file");
}

std::string_view taken(std::string_view& data, std::uint64_t size) {
    if (size > data.size()) throw std::runtime_error("not an ONNX file");
    const std::string_view front = data.substr(0, size);
    data.remove_prefix(size);
    return front;
}

/// Calls `visit` with the number of each field, its bytes and its number, of which it has one.
void each(std::string_view data, const std::function<void(std::uint64_t, std::string_view, std::uint64_t)>& visit) {
    while (!data.empty()) {
        const std::uint64_t key = varint(data), kind = key & 7U;
        if (kind == 0)
            visit(key >> 3U, {}, varint(data));
        else
            visit(key >> 3U, taken(data, kind == 2 ? varint(data) : kind == 1 ? 8 : 4), 0);
    }
}

OnnxInput input_of(std::string_view data) {
    OnnxInput input;
    each(data, [&](auto field, auto bytes, auto) {
        if (field == 1) input.name = bytes;
        if (field == 2)
            each(bytes, [&](auto, auto tensor, auto) {
                each(tensor, [&](auto part, auto shape, auto number) {
                    if (part == 1) input.type = static_cast<int>(number);
                    if (part == 2)
                        each(shape, [&](auto, auto dimension, auto) {
                            input.shape.push_back(-1);
                            each(dimension, [&](auto what, auto, auto size) {
                                if (what == 1) input.shape.back() = static_cast<std::int64_t>(size);
                            });
                        });
                });
            });
    });
    return input;
}

OnnxNode node_of(std::string_view data) {
    OnnxNode node;
    each(data, [&](auto field, auto bytes, auto) {
        if (field == 1) node.inputs.emplace_back(bytes);
        if (field == 3) node.name = bytes;
        if (field == 4) node.operation = bytes;
        if (field == 7) node.domain = bytes;
    });
    return node;
}

std::string location_of(std::string_view tensor) {
    std::string location;
    each(tensor, [&](auto field, auto entry, auto) {
        if (field != 13) return;
        std::string key, value;
        each(entry, [&](auto part, auto bytes, auto) { (part == 1 ? key : value) = bytes; });
        if (key == "location") location = value;
    });
    return location;
}

} // namespace

OnnxFile read_onnx(const std::string& data) {
    OnnxFile file;
    each(data, [&](auto field, auto graph, auto) {
        if (field != 7) return;
        each(graph, [&](auto part, auto bytes, auto) {
            if (part == 1) file.nodes.push_back(node_of(bytes));
            if (part == 5)
                if (std::string location = location_of(bytes); !location.empty()) file.locations.push_back(std::move(location));
            if (part == 11) file.inputs.push_back(input_of(bytes));
        });
    });
    if (file.nodes.empty()) throw std::runtime_error("not an ONNX file");
    return file;
}

} // namespace stub
