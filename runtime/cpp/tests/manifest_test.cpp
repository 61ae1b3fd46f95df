// What a manifest may be, and what it may not.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "conformance.hpp"
#include "manifest.hpp"

namespace {

using Json = nlohmann::json;

/// The message that a manifest is refused with, "" if it is not.
std::string refusal(const std::string& text) {
    try {
        mars::parse_manifest(text);
        return "";
    } catch (const mars::BundleError& error) {
        return error.what();
    }
}

std::string refusal_with(const std::string& pointer, const Json& value) {
    Json manifest = valid();
    manifest[Json::json_pointer(pointer)] = value;
    return refusal(manifest.dump());
}

} // namespace

TEST_CASE("a complete manifest") {
    const mars::Manifest manifest = mars::parse_manifest(valid().dump());
    CHECK(manifest.model.num_kv_heads == 2);
    CHECK(manifest.tokens.eos == std::vector<std::int64_t>{1, 2});
    CHECK(manifest.variants.at(0).weights == "weights.bin");
    CHECK_FALSE(manifest.variants.at(0).is_static());
    CHECK(manifest.profiles.at(0).metric == mars::Metric::margin);
}

TEST_CASE("errors name each invalid field") {
    CHECK(says(refusal_with("/model/vocab_size", 0), "manifest.json.model.vocab_size: an integer of 1 to 16777216 is expected, not 0"));
    CHECK(says(refusal_with("/model/vocab_size", 20.0), "vocab_size: an integer"));
    CHECK(says(refusal_with("/model/vocab_size", true), "vocab_size: an integer"));
    CHECK(says(refusal_with("/model/context_length", 18446744073709551615U), "context_length: an integer"));
    CHECK(says(refusal_with("/block", "8"), "manifest.json.block: an integer"));
    CHECK(says(refusal_with("/tokens/mask", 20), "tokens.mask: an integer of 0 to 19"));
    CHECK(says(refusal_with("/tokens/mask", 1), "the mask token cannot end a sequence"));
    CHECK(says(refusal_with("/tokens/eos", {1, "2"}), "tokens.eos: integers"));
    CHECK(says(refusal_with("/variants", Json::array()), "empty: nothing to run"));
    CHECK(says(refusal_with("/variants/0/backend", "tflite"), "`tflite` is not one of onnx, tensorrt, tensorrt_rtx"));
    CHECK(says(refusal_with("/variants/0/outputs", {"token_ids"}), "outputs: token_ids and confidence are needed"));
    CHECK(says(refusal_with("/variants/0/outputs/1", "feelings"), "outputs: token_ids and confidence are needed"));
    const std::vector<std::string> half{"token_ids", "confidence", "topk_ids"},
        both{"token_ids", "confidence", "topk_ids", "topk_logprobs"};
    CHECK(says(refusal_with("/variants/0/outputs", half), "outputs: topk_ids and topk_logprobs must both be listed, or neither"));
    CHECK_FALSE(says(refusal_with("/variants/0/outputs", both), "outputs"));
    Json engine = valid();
    engine["variants"][0]["outputs"] = both;
    engine["variants"][0]["backend"] = "tensorrt";
    CHECK_FALSE(says(refusal(engine.dump()), "outputs"));
    CHECK(says(refusal_with("/variants/0/file", "other.onnx"), "variant onnx-fp32 uses `other.onnx`, which `files` does not list"));
    CHECK(says(refusal_with("/files/0/path", "weights.bin"), "`weights.bin` is listed twice"));
    CHECK(says(refusal_with("/profiles/0/tau", nullptr), "profiles[0].tau: a finite number is expected"));
    CHECK(says(refusal_with("/tokens/mask", nullptr), "tokens.mask: null is valid only with masks 0"));
    CHECK(says(refusal_with("/masks", 4097), "masks: an integer of 0 to 4096"));
    CHECK(says(refusal_with("/text", "words"), "manifest.json.text: an object is expected"));
    for (const char* path : {"../model.onnx", "/etc/passwd", "a/b", ".hidden", "", "a\\b", "C:x", "model.onnx\n"})
        CHECK_MESSAGE(!refusal_with("/files/0/path", path).empty(), path);
    Json empty = {{"format_version", "1.0"}};
    CHECK(says(refusal(empty.dump()), "problems in the manifest:"));
}

TEST_CASE("libmars and Python refuse the same manifests") {
    const Json file = conformance("manifests.json");
    const auto refusal_of = [&](const Json& change) {
        Json manifest = file.at("manifest");
        manifest[Json::json_pointer(change.at(0).get<std::string>())] = change.at(1);
        return refusal(manifest.dump());
    };
    CHECK(refusal(file.at("manifest").dump()).empty());
    for (const Json& change : file.at("wrong")) CHECK_MESSAGE(!refusal_of(change).empty(), change.dump());
    for (const Json& change : file.at("good")) CHECK_MESSAGE(refusal_of(change).empty(), change.dump());
}

TEST_CASE("recurrent layers have no KV entries, and some layer has them") {
    Json manifest = valid();
    Json& net =
        manifest["model"]["recurrent"] = {{"layers", {0}}, {"heads", 2}, {"key_dim", 3}, {"value_dim", 4}, {"inputs", 5}, {"width", 3}};
    const mars::ModelInfo model = mars::parse_manifest(manifest.dump()).model;
    CHECK(model.kv_suffixes() == std::vector<std::string>{"1.key", "1.value"});
    CHECK(model.recurrent->shapes(64) == std::map<std::string, std::vector<std::int64_t>>{{"0.inputs", {67, 5}}, {"0.state", {2, 3, 4}}});
    CHECK(model.recurrent->state_bytes(64) == 4 * (67 * 5 + 24));
    net["layers"] = {1, 0};
    CHECK(says(refusal(manifest.dump()), "every layer is recurrent"));
    net["heads"] = 65537;
    CHECK(says(refusal(manifest.dump()), "model.recurrent.heads: an integer of 1 to 65536"));
}

TEST_CASE("lists and objects have a maximum size, and names are unique") {
    const auto eos = [](std::size_t num) { return refusal_with("/tokens/eos", std::vector<int>(num, 1)); };
    CHECK(says(eos(100001), "tokens.eos: at most 100000 entries are expected, not 100001"));
    CHECK(eos(100000).empty());
    std::string twice = valid().dump();
    CHECK(says(refusal(twice.insert(1, R"("block": 4, )")), "the name `block` is given twice"));
    twice = valid().dump();
    twice.insert(twice.find(R"("mask")"), R"("m\u0061sk": 19, )");
    CHECK(says(refusal(twice), "the name `mask` is given twice"));
}

TEST_CASE("a profile's number of masks is auto, full or a number; full without one") {
    const auto masks = [](const Json& value) {
        Json manifest = valid();
        manifest["profiles"][0]["masks"] = value;
        return mars::parse_manifest(manifest.dump()).profiles.at(0).masks;
    };
    CHECK(mars::parse_manifest(valid().dump()).profiles.at(0).masks == mars::all_masks);
    CHECK(masks(nullptr) == mars::all_masks);
    CHECK(masks("full") == mars::all_masks);
    CHECK(masks("auto") == mars::auto_masks);
    CHECK(masks(0) == 0);
    CHECK(masks(7) == 7);
    for (const Json& odd : {Json(-1), Json("wide"), Json(""), Json(2.0), Json(true), Json("7"), Json::array({1})})
        CHECK(says(refusal_with("/profiles/0/masks", odd), "profiles[0].masks: auto, full or an integer of 0 or more is expected"));
}

TEST_CASE("format versions") {
    CHECK(refusal_with("/format_version", "1.99").empty());
    CHECK(refusal_with("/format_version", "01.0").empty());
    CHECK(says(refusal_with("/format_version", "2.0"), "bundle format 2.0, this runtime reads 1.x: update mars-export"));
    CHECK(says(refusal_with("/format_version", "99999999999999999999.0"), "update mars-export"));
    CHECK(says(refusal_with("/format_version", "0.9"), "export the bundle again"));
    for (const Json& odd : {Json("one"), Json(1), Json(""), Json(nullptr), Json("-1.0"), Json(".0")})
        CHECK(says(refusal_with("/format_version", odd), "no `format_version`"));
}

TEST_CASE("texts that are not a manifest") {
    for (const char* text : {"", "{", "[]", "null", "1", "\"x\"", "{\"a\":}", "{} {}", "\xff\xfe", "{\"format_version\": \"1.0\"} x"})
        CHECK_MESSAGE(!refusal(text).empty(), text);
    CHECK(says(refusal(std::string(1000000, '[')), "nested too deep"));
    std::string deep = valid().dump();
    deep.insert(deep.find("\"n\":1") + 4, std::string(500, '[') + std::string(500, ']') + ",\"m\":");
    CHECK(says(refusal(deep), "nested too deep"));
    std::string huge = valid().dump();
    huge.replace(huge.find("0.9"), 3, "1e999");
    CHECK_FALSE(refusal(huge).empty());
    const std::string whole = valid().dump();
    for (std::size_t end = 0; end < whole.size(); end += 7) CHECK_FALSE(refusal(whole.substr(0, end)).empty());
}
