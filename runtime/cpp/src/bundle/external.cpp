// A walk over the messages of onnx.proto that lead to tensors, without recursion: a hostile file nests as deep as it likes.
#include "bundle/external.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mars {

namespace {

enum class Kind { none, model, training, function, graph, node, attribute, sparse, tensor, data };

/// What field `number` of a message of this kind is.
Kind inner(Kind kind, std::uint64_t number) {
    switch (kind) {
    case Kind::model:
        return number == 7 ? Kind::graph : number == 20 ? Kind::training : number == 25 ? Kind::function : Kind::none;
    case Kind::training:
        return number == 1 || number == 2 ? Kind::graph : Kind::none;
    case Kind::function:
        return number == 7 ? Kind::node : number == 11 ? Kind::attribute : Kind::none;
    case Kind::graph:
        return number == 1 ? Kind::node : number == 5 ? Kind::tensor : number == 15 ? Kind::sparse : Kind::none;
    case Kind::node:
        return number == 5 ? Kind::attribute : Kind::none;
    case Kind::attribute:
        if (number == 5 || number == 10) return Kind::tensor;
        if (number == 6 || number == 11) return Kind::graph;
        return number == 22 || number == 23 ? Kind::sparse : Kind::none;
    case Kind::sparse:
        return number == 1 || number == 2 ? Kind::tensor : Kind::none;
    case Kind::tensor:
        return number == 13 ? Kind::data : Kind::none;
    default:
        return Kind::none;
    }
}

constexpr std::uint64_t dims_field = 1, type_field = 2, int64_type = 7; // of a tensor

struct Part {
    Kind kind;
    std::string_view bytes;
};

/// The fields of a message, one after the other.
class Reader {
  public:
    explicit Reader(std::string_view bytes) : bytes_(bytes) {}

    bool is_over() const { return at_ == bytes_.size(); }

    std::uint64_t number = 0;
    bool is_bytes = false, is_number = false;
    std::string_view value;   // of bytes
    std::uint64_t single = 0; // of a number

    /// False for what is no message.
    bool next() {
        std::uint64_t tag = 0, length = 0;
        if (!varint(tag)) return false;
        number = tag >> 3U;
        const unsigned wire = tag & 7U;
        is_bytes = wire == 2;
        is_number = wire == 0;
        if (is_number) return varint(single);
        if (wire == 1)
            length = 8;
        else if (wire == 5)
            length = 4;
        else if (wire != 2 || !varint(length))
            return false;
        if (length > bytes_.size() - at_) return false;
        value = bytes_.substr(at_, static_cast<std::size_t>(length));
        at_ += static_cast<std::size_t>(length);
        return true;
    }

    /// One number of several that are packed. False for what is none.
    bool varint(std::uint64_t& result) {
        result = 0;
        for (unsigned shift = 0; shift < 70 && at_ < bytes_.size(); shift += 7) {
            const auto byte = static_cast<unsigned char>(bytes_[at_++]);
            if (shift < 64) result |= std::uint64_t{byte & 127U} << shift;
            if (byte < 128) return true;
        }
        return false;
    }

  private:
    std::string_view bytes_;
    std::size_t at_ = 0;
};

/// A tensor's element type and its dimensions, of which the first one and their number matter.
struct Shape {
    std::uint64_t type = 0, first = 0, count = 0;

    void add(std::uint64_t dim) {
        if (count++ == 0) first = dim;
    }

    /// Take in a field. False for what is no message.
    bool see(const Reader& field) {
        if (field.number == type_field && field.is_number) type = field.single;
        if (field.number != dims_field) return true;
        if (field.is_number) add(field.single);
        for (Reader packed(field.is_bytes ? field.value : std::string_view()); !packed.is_over();) {
            std::uint64_t dim = 0;
            if (!packed.varint(dim)) return false;
            add(dim);
        }
        return true;
    }

    std::uint64_t list_length() const { return type == int64_type && count == 1 ? first : 0; }
};

} // namespace

std::optional<Contents> graph_contents(std::string_view data) {
    if (data.empty()) return std::nullopt;
    Contents found;
    std::vector<Part> rest{{Kind::model, data}};
    while (!rest.empty()) {
        const Part part = rest.back();
        rest.pop_back();
        std::string_view key, value;
        Shape shape;
        for (Reader reader(part.bytes); !reader.is_over();) {
            if (!reader.next() || (part.kind == Kind::tensor && !shape.see(reader))) return std::nullopt;
            if (!reader.is_bytes) continue;
            if (part.kind == Kind::data) {
                if (reader.number == 1) key = reader.value;
                if (reader.number == 2) value = reader.value;
                continue;
            }
            const Kind kind = inner(part.kind, reader.number);
            if (kind == Kind::none) continue;
            found.is_nested = found.is_nested || kind == Kind::function || (kind == Kind::graph && part.kind == Kind::attribute);
            rest.push_back({kind, reader.value});
        }
        if (key == "location") found.names.emplace(value);
        found.longest = std::max(found.longest, shape.list_length());
    }
    return found;
}

} // namespace mars
