// Fuzzes the JSON readers: any bytes are a manifest, chat messages, or refused. What is read can be written and read
// again.
#include "../tests/manifest.hpp"

#include <stdexcept>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/fields.hpp"
#include "bundle/profiles.hpp"
#include "c_api/handles.hpp"
#include "deep.hpp"
#include "fuzz.hpp"

namespace {

void read_json(const std::string& text) {
    try {
        const nlohmann::json value = mars::parse_json(text);
        require(mars::parse_json(value.dump()) == value, "JSON that is read is written as it is");
    } catch (const std::runtime_error&) { // ours, for depth
    } catch (const nlohmann::json::exception&) {
    }
}

void use(const mars::Manifest& manifest) {
    const mars::Bundle bundle{"nowhere", manifest};
    for (const mars::Variant& variant : manifest.variants) {
        bundle.variant(variant.name);
        for (const mars::Profile& profile : manifest.profiles) {
            try {
                mars::find_profile(bundle, variant, profile.name);
            } catch (const mars::SessionError&) { // stale
            }
        }
    }
}

} // namespace

std::vector<std::string> seeds() {
    nlohmann::json rich = valid();
    rich["text"]["chat"] = {{"sequence", {{{"text", "a"}}}}};
    rich["profiles"][0]["masks"] = "auto";
    rich["profiles"][0]["weights_sha256"] = "b";
    rich["variants"][0]["quantization"] = {{"block_size", 32}, {"symmetric", true}, {"head", "int8"}, {"embedding", "int8"}};
    rich["variants"][0]["accuracy_level"] = 4;
    const nlohmann::json extent = {{"min", 1}, {"opt", 2}, {"max", 8}};
    rich["variants"].push_back(rich["variants"][0]);
    rich["variants"][1]["name"] = "engine";
    rich["variants"][1]["backend"] = "tensorrt";
    rich["variants"][1]["engine"] = {{"ranges", {{{"name", "decode"}, {"batch", extent}, {"slots", extent}, {"outputs", extent}}}},
                                     {"version", "10.3"},
                                     {"cuda", "12.6"},
                                     {"platform", "linux-x86_64"},
                                     {"compute_capabilities", {"8.7"}},
                                     {"graph", "model.onnx"}};
    rich["files"].push_back({{"path", "grammar-0123456789abcdef.dfa"}, {"size", 9}, {"sha256", "e"}});
    rich["grammars"] = {{{"name", "g"}, {"file", "grammar-0123456789abcdef.dfa"}, {"kind", "regex"}, {"states", 2}}};
    nlohmann::json large = rich;
    for (int i = 0; i < 300; ++i) large["tokens"]["eos"].push_back(i % 18);
    for (int i = 0; i < 60; ++i) large["files"].push_back({{"path", "f" + std::to_string(i)}, {"size", i}, {"sha256", "0123456789abcdef"}});
    return {
        valid().dump(), rich.dump(),
        large.dump(),   R"([{"role": "user", "content": "h\u00e9\ud83d\ude00"}, {"role": "assistant", "content": ""}])",
        "[\x01\x02]",   R"({"a": [1.5e308, -0.0, 18446744073709551615, -9223372036854775808, 1e-400], "a": "\ud800"})",
    };
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string text = deepened(data, size);
    read_json(text);
    try {
        use(mars::parse_manifest(text));
    } catch (const mars::BundleError&) {
    }
    try {
        require(!mars::c::messages_of(text.c_str()).empty(), "messages are not empty");
    } catch (const mars::SessionError&) {
    }
    return 0;
}
