// The bundle reader: what a manifest may be, what it may not, and files against it.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/held.hpp"
#include "bundle/libcrypto.hpp"
#include "bundle/sha256.hpp"
#include "bundle/stamps.hpp"
#include "conformance.hpp"
#include "manifest.hpp"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string hash_of(std::string_view data) {
    mars::Sha256 digest;
    digest.add(data);
    return digest.hex();
}

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

bool says(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

/// A field of a protobuf message.
std::string field(int number, const std::string& value) {
    std::string made(1, static_cast<char>(number << 3 | 2));
    if (number > 15) made = {static_cast<char>((number << 3 & 127) | 130), static_cast<char>(number >> 4)};
    if (value.size() < 128) return made + static_cast<char>(value.size()) + value;
    return made + static_cast<char>((value.size() & 127U) | 128U) + static_cast<char>(value.size() >> 7U) + value;
}

/// A graph is a model with the name of who made it, and nothing else.
std::string content_of(const std::string& name) {
    const bool is_graph = name.size() > 5 && name.substr(name.size() - 5) == ".onnx";
    return is_graph ? field(2, "content of " + name) : "content of " + name;
}

/// A tensor whose data is in `file`.
std::string tensor(const std::string& file) {
    return field(13, field(1, "location") + field(2, file)) + field(13, field(1, "offset") + field(2, "0"));
}

/// A directory that is gone at the end of the test.
struct Directory {
    fs::path path = fs::temp_directory_path() / ("mars-test-" + std::to_string(getpid()));
    fs::path cache = path.string() + "-cache"; // of this user, for the test
    Directory() {
        fs::create_directories(path);
        setenv("MARS_EXPORT_CACHE", cache.c_str(), 1);
    }
    ~Directory() {
        fs::remove_all(path);
        fs::remove_all(cache);
        unsetenv("MARS_EXPORT_CACHE");
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    void write(const std::string& name, const std::string& data) const { std::ofstream(path / name, std::ios::binary) << data; }

    std::string read(const std::string& name) const {
        std::ifstream file(path / name, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }

    /// A bundle whose files are right.
    void write_bundle() const {
        Json manifest = valid();
        for (Json& entry : manifest["files"]) {
            const auto name = entry["path"].get<std::string>();
            const std::string data = content_of(name);
            write(name, data);
            entry["size"] = data.size();
            entry["sha256"] = hash_of(data);
        }
        write("manifest.json", manifest.dump());
        write("manifest.sha256", hash_of(manifest.dump()) + "  manifest.json\n");
    }

    /// Another content of a file, whose hash the manifest has, as a hostile author would make it.
    void relist(const std::string& name, const std::string& data) const {
        Json manifest = Json::parse(read("manifest.json"));
        write(name, data);
        for (Json& entry : manifest["files"])
            if (entry["path"] == name) {
                entry["size"] = data.size();
                entry["sha256"] = hash_of(data);
            }
        write("manifest.json", manifest.dump());
        write("manifest.sha256", hash_of(manifest.dump()) + "  manifest.json\n");
    }

    std::string refusal(mars::Verify how = mars::Verify::once, bool safe = false) const {
        try {
            mars::open_bundle(path, how, safe);
            return "";
        } catch (const mars::BundleError& error) {
            return error.what();
        }
    }
};

} // namespace

TEST_CASE("SHA-256 of known texts") {
    CHECK(hash_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    const bool has_system = mars::Libcrypto::find() != nullptr;
    MESSAGE("libcrypto: " << (has_system ? "found" : "not found, both are our own"));
    std::string bytes;
    for (int size = 0; size < 300; ++size, bytes += static_cast<char>(size * 7)) { // in one piece, and in two
        const std::string_view all = bytes, half = all.substr(0, all.size() / 3);
        mars::Sha256 whole(mars::Hasher::system), parts(mars::Hasher::system);
        whole.add(all);
        parts.add(half);
        parts.add(all.substr(half.size()));
        const std::string expected = hash_of(bytes);
        CHECK(whole.hex() == expected);
        CHECK(parts.hex() == expected);
    }
    mars::Sha256 million;
    for (int i = 0; i < 1000; ++i) million.add(std::string(1000, 'a'));
    CHECK(million.hex() == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("a whole manifest") {
    const mars::Manifest manifest = mars::parse_manifest(valid().dump());
    CHECK(manifest.model.num_kv_heads == 2);
    CHECK(manifest.tokens.eos == std::vector<std::int64_t>{1, 2});
    CHECK(manifest.text->eos_token == "<e>");
    CHECK_FALSE(manifest.text->chat_template);
    CHECK(manifest.variants.at(0).weights == "weights.bin");
    CHECK_FALSE(manifest.variants.at(0).is_static());
    CHECK(manifest.variants.at(0).drift->max_logit_error == 1e-5);
    CHECK(manifest.profiles.at(0).metric == mars::Metric::margin);
    CHECK(manifest.profiles.at(0).evidence == R"({"n":1})");
}

TEST_CASE("how weights are stored, under the old name too, and what the drift was proven against") {
    Json manifest = valid();
    Json& variant = manifest["variants"][0];
    CHECK_FALSE(mars::parse_manifest(manifest.dump()).variants.at(0).quantization);
    CHECK_FALSE(mars::parse_manifest(manifest.dump()).variants.at(0).drift->yardstick);
    variant["drift"]["yardstick"] = "transformers 5.23.0";
    variant["quantization"] = {{"group_size", 32}, {"symmetric", true}, {"head", "int8"}, {"embedding", "float"}};
    const auto read = [&] { return mars::parse_manifest(manifest.dump()).variants.at(0); };
    CHECK(read().drift->yardstick == "transformers 5.23.0");
    CHECK(read().quantization->group_size == 32);
    CHECK(read().quantization->symmetric);
    CHECK(read().quantization->head == "int8");
    variant["quantization"]["group_size"] = nullptr;
    CHECK_FALSE(read().quantization->group_size);
    variant["quantization"].erase("group_size");
    variant["quantization"]["block_size"] = 128;
    CHECK(read().quantization->group_size == 128);
    variant["quantization"] = {{"group_size", 0}, {"head", "int8"}};
    const std::string message = refusal(manifest.dump());
    for (const char* name : {"group_size", "symmetric", "embedding"}) CHECK(says(message, std::string("quantization.") + name + ": "));
}

TEST_CASE("what is wrong in a manifest is named") {
    CHECK(says(refusal_with("/model/vocab_size", 0), "manifest.json.model.vocab_size: an integer of 1 to 16777216 is expected, not 0"));
    CHECK(says(refusal_with("/model/vocab_size", 20.0), "vocab_size: an integer"));
    CHECK(says(refusal_with("/model/vocab_size", true), "vocab_size: an integer"));
    CHECK(says(refusal_with("/model/context_length", 18446744073709551615U), "context_length: an integer"));
    CHECK(says(refusal_with("/block", "8"), "manifest.json.block: an integer"));
    CHECK(says(refusal_with("/tokens/mask", 20), "tokens.mask: an integer of 0 to 19"));
    CHECK(says(refusal_with("/tokens/mask", 1), "the mask token cannot end a sequence"));
    CHECK(says(refusal_with("/tokens/eos", {1, "2"}), "tokens.eos: integers"));
    CHECK(says(refusal_with("/model/num_kv_heads", 3), "4 heads cannot share 3 key/value heads"));
    CHECK(says(refusal_with("/variants", Json::array()), "empty: nothing to run"));
    CHECK(says(refusal_with("/variants/0/backend", "tflite"), "`tflite` is not one of onnx, tensorrt, tensorrt_rtx"));
    CHECK(says(refusal_with("/variants/0/outputs", {"token_ids"}), "outputs: token_ids and confidence are needed"));
    CHECK(says(refusal_with("/variants/0/outputs/1", "feelings"), "outputs: token_ids and confidence are needed"));
    const std::vector<std::string> half{"token_ids", "confidence", "topk_ids"},
        both{"token_ids", "confidence", "topk_ids", "topk_logprobs"};
    CHECK(says(refusal_with("/variants/0/outputs", half), "outputs: topk_ids and topk_logprobs are there together or not at all"));
    CHECK_FALSE(says(refusal_with("/variants/0/outputs", both), "outputs"));
    Json engine = valid();
    engine["variants"][0]["outputs"] = both;
    engine["variants"][0]["backend"] = "tensorrt";
    CHECK_FALSE(says(refusal(engine.dump()), "outputs"));
    CHECK(says(refusal_with("/variants/0/file", "other.onnx"), "variant onnx-fp32 uses `other.onnx`, which `files` does not list"));
    CHECK(says(refusal_with("/variants/1", valid()["variants"][0]), "`onnx-fp32` is there twice"));
    CHECK(says(refusal_with("/files/0/path", "weights.bin"), "`weights.bin` is listed twice"));
    CHECK(says(refusal_with("/profiles/0/variant", "x"), "profile `p` is for variant `x`, which is not there"));
    CHECK(says(refusal_with("/profiles/0/tau", nullptr), "profiles[0].tau: a finite number is expected, not nothing"));
    CHECK(says(refusal_with("/text", "words"), "manifest.json.text: an object is expected"));
    for (const char* path : {"../model.onnx", "/etc/passwd", "a/b", ".hidden", "", "a\\b", "C:x", "model.onnx\n"})
        CHECK_MESSAGE(!refusal_with("/files/0/path", path).empty(), path);
    Json empty = {{"format_version", "1.0"}};
    CHECK(says(refusal(empty.dump()), "problems in the manifest:"));
}

TEST_CASE("lists and objects have a most, and names are given once") {
    const auto many = [](const char* path, std::size_t num, const Json& each) {
        Json list = Json::array();
        for (std::size_t i = 0; i < num; ++i) list.push_back(each);
        return refusal_with(path, list);
    };
    const std::pair<const char*, std::size_t> mosts[] = {
        {"variants", 64}, {"files", 1000}, {"profiles", 10000}, {"prefixes", 256}, {"grammars", 256}};
    for (const auto& [name, most] : mosts) {
        const std::string words =
            "manifest.json." + std::string(name) + ": at most " + std::to_string(most) + " entries are expected, not ";
        CHECK(says(many(("/" + std::string(name)).c_str(), most + 1, Json::object()), words + std::to_string(most + 1)));
        CHECK_FALSE(says(many(("/" + std::string(name)).c_str(), most, Json::object()), words));
    }
    CHECK(says(many("/variants/0/outputs", 17, "token_ids"), "variants[0].outputs: at most 16 entries are expected, not 17"));
    CHECK(says(many("/tokens/eos", 100001, 1), "tokens.eos: at most 100000 entries are expected, not 100001"));
    CHECK(many("/tokens/eos", 100000, 1).empty());
    CHECK(says(many("/tokens/eos", 1000000, 1), "tokens.eos: at most 100000 entries"));
    Json evidence = 1;
    for (int level = 0; level < 32; ++level) evidence = Json::array({evidence});
    CHECK(says(refusal_with("/profiles/0/evidence/n", evidence), "profiles[0].evidence: more than 32 levels"));
    CHECK(refusal_with("/profiles/0/evidence/n", evidence[0]).empty());
    std::string twice = valid().dump();
    CHECK(says(refusal(twice.insert(1, R"("block": 4, )")), "the name `block` is given twice"));
    twice = valid().dump();
    twice.insert(twice.find(R"("mask")"), R"("m\u0061sk": 19, )");
    CHECK(says(refusal(twice), "the name `mask` is given twice"));
}

TEST_CASE("a profile's window: auto, full or a number, and full where an older bundle says nothing") {
    const auto window = [](const Json& value) {
        Json manifest = valid();
        manifest["profiles"][0]["window"] = value;
        return mars::parse_manifest(manifest.dump()).profiles.at(0).window;
    };
    CHECK(mars::parse_manifest(valid().dump()).profiles.at(0).window == mars::full_window);
    CHECK(window(nullptr) == mars::full_window);
    CHECK(window("full") == mars::full_window);
    CHECK(window("auto") == mars::auto_window);
    CHECK(window(1) == 1);
    CHECK(window(7) == 7);
    for (const Json& odd : {Json(0), Json(-1), Json("wide"), Json(""), Json(2.0), Json(true), Json("7"), Json::array({1})})
        CHECK(says(refusal_with("/profiles/0/window", odd), "profiles[0].window: auto, full or an integer of 1 or more is expected"));
}

TEST_CASE("versions") {
    CHECK(refusal_with("/format_version", "1.99").empty());
    CHECK(refusal_with("/format_version", "01.0").empty());
    CHECK(says(refusal_with("/format_version", "2.0"), "bundle format 2.0, this runtime reads 1.x: update mars-export"));
    CHECK(says(refusal_with("/format_version", "99999999999999999999.0"), "update mars-export"));
    CHECK(says(refusal_with("/format_version", "0.9"), "export the bundle again"));
    for (const Json& odd : {Json("one"), Json(1), Json(""), Json(nullptr), Json("-1.0"), Json(".0")})
        CHECK(says(refusal_with("/format_version", odd), "no `format_version`"));
}

TEST_CASE("texts that are no manifest") {
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

TEST_CASE("a bundle directory") {
    const Directory bundle;
    CHECK(says(bundle.refusal(), "not a bundle: it has no manifest.json"));
    bundle.write_bundle();
    CHECK(bundle.refusal() == "");
    CHECK(bundle.refusal() == ""); // by its stamps
    CHECK(bundle.refusal(mars::Verify::always) == "");
    CHECK(bundle.refusal(mars::Verify::never) == "");

    SUBCASE("a file of another content") {
        bundle.write("weights.bin", "content of weights.bim");
        CHECK(says(bundle.refusal(), "weights.bin: its content does not match the manifest's sha256"));
        CHECK(says(bundle.refusal(mars::Verify::always), "weights.bin: its content does not match the manifest's sha256"));
        CHECK(bundle.refusal(mars::Verify::never) == ""); // and nothing of it is believed later
        CHECK(says(bundle.refusal(), "weights.bin: its content does not match the manifest's sha256"));
    }
    SUBCASE("files of another size, or missing, are all named") {
        bundle.write("weights.bin", "short");
        fs::remove(bundle.path / "model.onnx");
        CHECK(says(bundle.refusal(), "weights.bin: 5 bytes, the manifest says 22"));
        CHECK(says(bundle.refusal(), "model.onnx: missing"));
        CHECK(says(bundle.refusal(mars::Verify::never), "weights.bin: 5 bytes, the manifest says 22"));
        CHECK(says(bundle.refusal(mars::Verify::never), "model.onnx: missing"));
    }
    SUBCASE("a directory in a file's place") {
        fs::remove(bundle.path / "model.onnx");
        fs::create_directory(bundle.path / "model.onnx");
        CHECK(says(bundle.refusal(), "model.onnx: missing"));
    }
    SUBCASE("a link that leads out, and one that does not") {
        fs::rename(bundle.path / "weights.bin", bundle.path / "elsewhere");
        fs::create_symlink("elsewhere", bundle.path / "weights.bin");
        CHECK(bundle.refusal() == "");
        const fs::path outside = bundle.path.string() + "-outside";
        fs::rename(bundle.path / "elsewhere", outside);
        fs::remove(bundle.path / "weights.bin");
        fs::create_symlink(outside, bundle.path / "weights.bin");
        CHECK(says(bundle.refusal(), "weights.bin: a link that leads out of the bundle"));
        fs::remove(outside);
    }
    SUBCASE("a checksum that is missing or of another manifest") {
        bundle.write("manifest.sha256", hash_of("x") + "  manifest.json\n");
        CHECK(says(bundle.refusal(), "manifest.json does not match manifest.sha256"));
        fs::remove(bundle.path / "manifest.sha256");
        CHECK(says(bundle.refusal(), "manifest.json does not match manifest.sha256"));
    }
    SUBCASE("a rewrite that was interrupted leaves two checksums, either of which will do") {
        const std::string other = hash_of("x") + "  manifest.json\n";
        const std::string own = hash_of(bundle.read("manifest.json")) + "  manifest.json\n";
        for (const std::string& lines : {own + other, other + own}) {
            bundle.write("manifest.sha256", lines);
            CHECK(bundle.refusal() == "");
        }
        bundle.write("manifest.sha256", other + own.substr(0, own.size() - 1));
        CHECK(says(bundle.refusal(), "manifest.json does not match manifest.sha256"));
    }
    SUBCASE("stamps that are hostile or of another file are not believed") {
        const fs::path file = *mars::stamp_file(bundle.path);
        CHECK(file.parent_path().parent_path() == bundle.cache);
        CHECK_FALSE(fs::exists(bundle.path / ".verified.json"));
        for (const char* stamps : {"[]", "{", "{\"weights.bin\": 1}", "{\"weights.bin\": [\"\", 1, 2, 3]}"}) {
            std::ofstream(file) << stamps;
            CHECK(bundle.refusal() == "");
            CHECK(Json::parse(std::ifstream(file)).contains("weights.bin")); // written anew
        }
        const std::string deep(1000000, '[');
        for (const std::string& stamps : {deep, deep + std::string(1000000, ']'), "{\"x\": " + deep + std::string(1000000, ']') + "}"}) {
            std::ofstream(file) << stamps;
            CHECK(bundle.refusal() == "");
        }
    }
    SUBCASE("a good stamp spares the hashing, of the very file that was hashed only") {
        const fs::path file = *mars::stamp_file(bundle.path), weights = bundle.path / "weights.bin";
        const fs::file_time_type time = fs::last_write_time(weights);
        const Json before = Json::parse(std::ifstream(file));
        bundle.write("weights.bin", "content of weights.bim");
        fs::last_write_time(weights, time); // the time of its last change of all kinds cannot be set back
        CHECK(says(bundle.refusal(), "weights.bin: its content does not match"));
        CHECK(Json::parse(std::ifstream(file)) == before);
        Json forged = before;
        struct stat state{};
        REQUIRE(stat(weights.c_str(), &state) == 0);
        forged["weights.bin"][3] = std::int64_t{state.st_ctim.tv_sec} * 1000000000 + state.st_ctim.tv_nsec;
        std::ofstream(file) << forged; // the user's own word, which is believed unless all is to be looked into
        CHECK(bundle.refusal() == "");
        CHECK(says(bundle.refusal(mars::Verify::always), "weights.bin: its content does not match"));
    }
    SUBCASE("no place for stamps: all is hashed, nothing is written") {
        setenv("MARS_EXPORT_CACHE", "/dev/null/cache", 1);
        CHECK(bundle.refusal() == "");
        fs::remove_all(bundle.cache);
        unsetenv("MARS_EXPORT_CACHE");
        setenv("XDG_CACHE_HOME", bundle.cache.c_str(), 1);
        CHECK(mars::cache_dir() == bundle.cache / "mars-export");
        CHECK(bundle.refusal() == "");
        CHECK(fs::exists(bundle.cache / "mars-export" / "verified"));
        unsetenv("XDG_CACHE_HOME");
    }
    SUBCASE("an unknown variant") {
        const mars::Bundle opened = mars::open_bundle(bundle.path);
        CHECK(opened.variant("onnx-fp32").file == "model.onnx");
        CHECK_THROWS_WITH_AS(opened.variant("x"), (bundle.path.string() + ": no variant `x` (there are: onnx-fp32)").c_str(),
                             mars::BundleError);
    }
}

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

TEST_CASE("a small file is read as it was when the bundle was opened, or not at all") {
    const Directory bundle;
    bundle.write_bundle();
    const mars::Bundle opened = mars::open_bundle(bundle.path);
    const fs::path away = bundle.path.string() + "-away";
    fs::rename(bundle.path, away);
    fs::create_directories(bundle.path);
    bundle.write("weights.bin", "content of somebody el");
    CHECK(opened.read("weights.bin", 100) == "content of weights.bin"); // of the directory that was opened
    fs::copy_file(away / "weights.bin", away / "copy");
    fs::rename(away / "copy", away / "weights.bin");
    CHECK(opened.read("weights.bin", 100) == "content of weights.bin"); // another file, of the same content
    const auto refusal_of = [&](std::size_t limit) -> std::string {
        try {
            opened.read("weights.bin", limit);
        } catch (const mars::BundleError& error) {
            return error.what();
        }
        return "";
    };
    const std::string words = (bundle.path / "weights.bin").string() + ": was written to since the bundle was opened; open it again";
    CHECK(refusal_of(7) == words); // a beginning is another content
    std::ofstream(away / "weights.bin") << "content of weights.bim";
    CHECK(refusal_of(100) == words);
    fs::remove_all(away);
    CHECK(says(refusal_of(100), "weights.bin: cannot be read; open the bundle again"));
}

TEST_CASE("safe mode: no loops and functions, no stamps, no more than a bundle needs") {
    const Directory bundle;
    bundle.write_bundle();
    const std::string graph = Json::parse(bundle.read("manifest.json"))["variants"][0]["file"];
    CHECK(bundle.refusal(mars::Verify::once, true).empty());
    CHECK_FALSE(fs::exists(bundle.cache / "verified"));
    for (const std::string& nested : {field(7, field(1, field(5, field(6, field(2, "body"))))), field(25, field(1, "ours"))}) {
        bundle.relist(graph, nested);
        CHECK(bundle.refusal().empty());
        CHECK(says(bundle.refusal(mars::Verify::once, true),
                   graph + ": the graph has loops, branches or functions, which safe mode refuses"));
    }
    bundle.write_bundle();
    bundle.relist("tokenizer.json", std::string(64000001, ' '));
    CHECK(bundle.refusal().empty());
    CHECK(says(bundle.refusal(mars::Verify::once, true), "bytes of tokenizer.json: 64000001, 64000000 are taken"));
    bundle.write_bundle();
    bundle.relist("tokenizer.json", "content of tokenizer.jsom"); // as long, with a stamp that calls it good
    CHECK(bundle.refusal().empty());
    const std::string stamp = bundle.cache / "verified";
    CHECK(fs::exists(stamp));
}

TEST_CASE("a bundle is the directory that was verified, whatever has its name by now") {
    const Directory bundle;
    bundle.write_bundle();
    const mars::Bundle opened = mars::open_bundle(bundle.path);
    CHECK(opened.changed().empty());
    const fs::path away = bundle.path.string() + "-away";
    fs::rename(bundle.path, away);
    CHECK(opened.changed().empty());
    CHECK(mars::read_file(opened.place("weights.bin")) == "content of weights.bin");
    fs::create_directories(bundle.path);
    bundle.write("weights.bin", "content of somebody el");
    CHECK(mars::read_file(opened.place("weights.bin")) == "content of weights.bin");
    std::ofstream(away / "weights.bin") << "content of weights.bin"; // the same, written once more
    CHECK(opened.changed() == std::vector<std::string>{"weights.bin"});
    fs::remove_all(away);
    CHECK(opened.changed().size() == opened.manifest.files.size());
}

TEST_CASE("a file that is in use tells that it was written to, and not that it was replaced") {
    const Directory bundle;
    bundle.write("weights.bin", "some weights");
    const mars::Watched watched(bundle.path / "weights.bin", "shown");
    watched.check();
    fs::rename(bundle.path / "weights.bin", bundle.path / "old");
    bundle.write("weights.bin", "some others");
    watched.check();
    fs::resize_file(bundle.path / "old", 4);
    CHECK_THROWS_WITH_AS(watched.check(),
                         "shown: was written to while it is in use; open the bundle again (a bundle is replaced by renaming, "
                         "never written over)",
                         mars::BundleError);
    mars::Watched().check();
}
