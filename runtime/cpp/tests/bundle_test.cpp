// A bundle's directory: its files against the manifest, their hashes and stamps, and what happens to them while it is open.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <sys/stat.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/sha256.hpp"
#include "directory.hpp"
#include "manifest.hpp"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

} // namespace

TEST_CASE("SHA-256 of known texts") {
    CHECK(mars::sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(mars::sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(mars::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    std::string bytes;
    for (int size = 0; size < 300; ++size, bytes += static_cast<char>(size * 7)) { // in one piece, and in two
        const std::string_view all = bytes, half = all.substr(0, all.size() / 3);
        mars::Sha256 whole, parts;
        whole.add(all);
        parts.add(half);
        parts.add(all.substr(half.size()));
        const std::string expected = mars::sha256(bytes);
        CHECK(whole.hex() == expected);
        CHECK(parts.hex() == expected);
    }
    mars::Sha256 million;
    for (int i = 0; i < 1000; ++i) million.add(std::string(1000, 'a'));
    CHECK(million.hex() == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("opening a bundle checks its directory and files") {
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
    SUBCASE("a file that the manifest does not list") {
        bundle.write("notes.txt", "x");
        CHECK(says(bundle.refusal(), "notes.txt: not listed in the manifest"));
        CHECK(says(bundle.refusal(mars::Verify::never), "notes.txt: not listed in the manifest"));
    }
    SUBCASE("a checksum that is missing or of another manifest") {
        bundle.write("manifest.sha256", mars::sha256("x") + "  manifest.json\n");
        CHECK(says(bundle.refusal(), "manifest.json does not match manifest.sha256"));
        fs::remove(bundle.path / "manifest.sha256");
        CHECK(says(bundle.refusal(), "manifest.json does not match manifest.sha256"));
    }
    SUBCASE("stamps that are hostile or of another file are not believed") {
        const fs::path file = *mars::stamp_file(bundle.path);
        CHECK(file.parent_path().parent_path() == bundle.cache);
        CHECK_FALSE(fs::exists(bundle.path / ".verified.json"));
        for (const char* stamps : {"[]", "{", "{\"weights.bin\": 1}", "{\"weights.bin\": [\"\", 1, 2, 3]}"}) {
            std::ofstream(file) << stamps;
            CHECK(bundle.refusal() == "");
            CHECK(Json::parse(std::ifstream(file)).contains("weights.bin")); // written again
        }
        const std::string deep(1000000, '[');
        for (const std::string& stamps : {deep, deep + std::string(1000000, ']'), "{\"x\": " + deep + std::string(1000000, ']') + "}"}) {
            std::ofstream(file) << stamps;
            CHECK(bundle.refusal() == "");
        }
    }
    SUBCASE("a valid stamp saves the hashing of the same file only") {
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

TEST_CASE("safe mode uses no stamps and has stricter limits") {
    const Directory bundle;
    bundle.write_bundle();
    CHECK(bundle.refusal(mars::Verify::once, true).empty());
    CHECK_FALSE(fs::exists(bundle.cache / "verified"));
    bundle.relist("tokenizer.json", std::string(64000001, ' '));
    CHECK(bundle.refusal().empty());
    CHECK(says(bundle.refusal(mars::Verify::once, true), "bytes of tokenizer.json: 64000001, 64000000 are allowed"));
    bundle.write_bundle();
    bundle.relist("tokenizer.json", "content of tokenizer.jsom"); // as long, with a stamp that calls it good
    CHECK(bundle.refusal().empty());
    const std::string stamp = bundle.cache / "verified";
    CHECK(fs::exists(stamp));
}
