// TensorRT engines against their manifest: files and tensors that are refused, and kernels that are kept beside the bundle.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include "stub_bundle.hpp"

TEST_CASE("a file that is not an engine is refused with TensorRT's reasons") {
    const Made made({}, "garbage");
    CHECK(refused([&] { made.open(); }) == (made.bundle.path / "rtx.engine").string() + ": " + mars::tensorrt_flavor() +
                                               " 10.16.0.72 cannot load this engine: the magic tag does not match");
    CHECK(stub::state().memory.empty());
}

TEST_CASE("TensorRT's log reaches on_log") {
    const Made made({}, "garbage");
    std::vector<std::string> said;
    const auto hear = [&](mars::LogLevel level, std::string_view line) {
        said.push_back(std::to_string(static_cast<int>(level)) + std::string(line));
    };
    refused([&] { mars::TrtBackend(made.bundle, made.bundle.manifest.variants.front(), {0, nullptr, hear}); });
    CHECK(said == std::vector<std::string>{"2an unexpected warning", "3the magic tag does not match"});
}

TEST_CASE("an engine of another model is refused every time") {
    for (const std::int64_t slots : {2, 9}) { // decode, prefill
        const Made made;
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(1);
        mars::StepOutput output;
        stub::state().unknown_tensors = {"present.1.key", "kv_length"};
        for (int i = 0; i < 2; ++i)
            CHECK(refused([&] { backend.step(*cache, 0, input(1, slots), false, output); }) ==
                  "the engine and the manifest disagree about kv_length, kv_length, present.1.key; build the engine again");
    }
}

TEST_CASE("an engine whose tensors differ from the manifest is refused before a step") {
    const auto refusal = [](const std::string& name, const char* what, const nlohmann::json& value) {
        const Made made;
        stub::state().tensors[name][what] = value;
        return refused([&] { made.open(); });
    };
    const auto names = [](const std::string& name) {
        return "the engine and the manifest disagree about " + name + "; build the engine again";
    };
    CHECK(refusal("past_key_values.1.key", "dtype", "float16") == names("past_key_values.1.key"));
    CHECK(refusal("present.0.value", "dtype", "float16") == names("present.0.value"));
    CHECK(refusal("input_ids", "dtype", "int32") == names("input_ids"));
    CHECK(refusal("confidence", "dtype", "float16") == names("confidence"));
    CHECK(refusal("present.0.key", "shape", {-1, 3, -1, 4}) == names("present.0.key"));
    CHECK(refusal("past_key_values.0.value", "shape", {-1, 2, 4}) == names("past_key_values.0.value"));
    CHECK(refusal("past_key_values.0.value", "shape", {-1, 2, 65, 4}) == names("past_key_values.0.value"));
    CHECK(refusal("present.1.value", "alias", "past_key_values.0.value") == names("present.1.value"));
    CHECK(refusal("token_ids", "name", "tokens") == names("token_ids, tokens"));
    CHECK(refusal("kv_length", "shape", {-1, -1}) == names("kv_length"));
    const auto wide = [](const std::string& name, const char* what, const nlohmann::json& value) {
        EngineShape top_k;
        top_k.top_k = 5;
        const Made made(top_k);
        stub::state().tensors[name][what] = value;
        return refused([&] { made.open(); });
    };
    CHECK(wide("topk_ids", "dtype", "float32") == names("topk_ids"));
    CHECK(wide("topk_logprobs", "shape", {-1, -1}) == names("topk_logprobs"));
    CHECK(wide("topk_logprobs", "shape", {-1, -1, 6}) == names("topk_logprobs"));
    CHECK(wide("topk_ids", "shape", {-1, -1, -1}) == names("topk_ids"));
    CHECK(wide("topk_ids", "shape", {-1, -1, 1001}) == names("topk_ids, topk_logprobs"));
    EngineShape shape;
    shape.kv_layout = "appended";
    const Made made(shape);
    stub::state().tensors["present.1.value"]["alias"] = "past_key_values.1.value";
    CHECK(refused([&] { made.open(); }) == names("present.1.value"));
    CHECK(stub::state().memory.empty());
}

TEST_CASE("impossibly large shapes are refused") {
    EngineShape shape;
    shape.capacity = std::int64_t{1} << 52;
    Made made(shape);
    const auto opened = [&] { made.open().new_cache(1)->reserve(1); };
    CHECK(refused(opened).find("out of memory (cudaErrorMemoryAllocation)") != std::string::npos);
    nlohmann::json engine = nlohmann::json::parse(stub_engine(shape));
    engine["kv_heads"] = engine["head_dim"] = made.bundle.manifest.model.num_kv_heads = made.bundle.manifest.model.head_dim = 65536;
    std::ofstream(made.bundle.path / "rtx.engine") << engine;
    CHECK(refused(opened) == "the shapes of a step are beyond any memory; export or build again");
    CHECK(stub::state().memory.empty());
    shape.capacity = 3;
    shape.fixed = true;
    const Made small(shape);
    CHECK(refused([&] { small.open(); }).find("less than one step") != std::string::npos);
}

#ifdef MARS_STUB_RTX
TEST_CASE("compiled kernels are saved beside the bundle and read at the next start") {
    const Made made;
    const auto file = made.bundle.path.parent_path() / ".a.bundle.rtx-0123456789ab.kernels";
    for (int start = 0; start < 2; ++start) {
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(1);
        mars::StepOutput output;
        for (int i = 0; i < 4; ++i) backend.step(*cache, 0, input(1, 2), false, output);
        CHECK(std::filesystem::file_size(file) == std::string("kernels k").size() + static_cast<std::size_t>(start));
    }
    std::filesystem::remove(file);
    std::filesystem::create_directory(file); // a place that cannot be written changes nothing else
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids.size() == 1);
    CHECK(std::distance(std::filesystem::directory_iterator(made.bundle.path.parent_path()), {}) == 2);
}
#endif
