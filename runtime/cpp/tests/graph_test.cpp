// What a bundle's graph may take data from, and the shapes that it may hold.
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "bundle/bundle.hpp"
#include "directory.hpp"
#include "manifest.hpp"

namespace {

using Json = nlohmann::json;

/// A tensor whose data is in `file`.
std::string tensor(const std::string& file) {
    return field(13, field(1, "location") + field(2, file)) + field(13, field(1, "offset") + field(2, "0"));
}

} // namespace

TEST_CASE("data that the manifest does not list is refused, wherever a graph takes it from") {
    const Directory bundle;
    bundle.write_bundle();
    const std::string graph = Json::parse(bundle.read("manifest.json"))["variants"][0]["file"];
    const auto hidden = tensor("hidden.bin");
    // graph.initializer; a node's attribute; a sparse one; a branch's inner graph; a function's node; a training graph
    const std::vector<std::string> places{
        field(7, field(5, hidden)),
        field(7, field(1, field(5, field(5, hidden)))),
        field(7, field(1, field(5, field(10, hidden)))),
        field(7, field(15, field(1, hidden))),
        field(7, field(1, field(5, field(22, field(2, hidden))))),
        field(7, field(1, field(5, field(6, field(5, hidden))))),
        field(7, field(1, field(5, field(11, field(1, field(5, field(5, hidden))))))),
        field(25, field(7, field(5, field(5, hidden)))),
        field(25, field(11, field(5, hidden))),
        field(20, field(1, field(5, hidden))),
    };
    for (const std::string& place : places) {
        bundle.relist(graph, place);
        CHECK(says(bundle.refusal(), graph + ": the graph takes data from `hidden.bin`, which `files` does not list"));
    }
    bundle.relist(graph, field(7, field(5, tensor("weights.bin"))));
    CHECK(bundle.refusal().empty());
    bundle.relist(graph, field(7, field(5, tensor("../weights.bin"))));
    CHECK(says(bundle.refusal(), "`../weights.bin`, which `files` does not list"));
    for (const std::string& data : {std::string(), std::string("\x63 none"), std::string("\x12\x7f short"), std::string(11, '\xff')}) {
        bundle.relist(graph, data);
        CHECK(says(bundle.refusal(), graph + ": not an ONNX graph"));
    }
}

TEST_CASE("a list in a graph that may become a shape is short, however protobuf writes it") {
    const Directory bundle;
    bundle.write_bundle();
    const std::string graph = Json::parse(bundle.read("manifest.json"))["variants"][0]["file"];
    const auto of_type = [](const std::string& dims, char type) { return dims + "\x10" + type; };
    const std::string million = "\x80\x80\x40", longest = "\x80\x80\x04", longer = "\x81\x80\x04";
    const std::pair<std::string, bool> lists[] = {
        {of_type("\x08" + million, 7), true},
        {"\x10\x07" + field(1, million), true},
        {of_type("\x08" + million, 1), false},
        {of_type(field(1, million + "\x01"), 7), false}, // a table
        {of_type("\x08" + longest, 7), false},
        {of_type("\x08" + longer, 7), true},
        {of_type("\x08" + std::string(9, '\xff') + "\x01", 7), true}, // below 0
    };
    for (const auto& [tensor, is_long] : lists) {
        bundle.relist(graph, field(7, field(5, tensor)));
        CHECK(says(bundle.refusal(), graph + ": a list of ") == is_long);
        CHECK(bundle.refusal().empty() == !is_long);
        bundle.relist(graph, field(7, field(1, field(5, field(5, tensor))))); // a node's own
        CHECK(says(bundle.refusal(), graph + ": a list of ") == is_long);
    }
    bundle.relist(graph, field(7, field(5, of_type("\x08" + million, 7))));
    CHECK(says(bundle.refusal(), "a list of 1048576 integers, 65536 are the most"));
    bundle.relist(graph, field(7, field(5, field(1, "\xff") + "\x10\x07")));
    CHECK(says(bundle.refusal(), "not an ONNX graph"));
}
