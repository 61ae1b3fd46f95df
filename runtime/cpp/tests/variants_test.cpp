// Which variant opens where, and the words for those that do not.
#include <doctest/doctest.h>

#include <mars/errors.hpp>

#include "device/name.hpp"
#include "device/ort/open.hpp"
#include "device/variants.hpp"
#include "engine_manifest.hpp"
#include "log.hpp"
#include "manifest.hpp"

namespace {

mars::Here rtx_machine() {
    return {mars::this_platform(), {{"tensorrt_rtx", "10.16.0.72"}}, {{"tensorrt", "no such file"}}, "sm86", "Stub GPU", "12.9", ""};
}

/// A bundle with a dynamic graph, a fixed one and an engine, in this order.
mars::Bundle bundle() {
    const nlohmann::json other = valid();
    nlohmann::json whole = engine_manifest({}), graph = other["variants"][0], fixed = graph;
    fixed["name"] = "fixed";
    fixed["batch"] = fixed["slots"] = 1;
    whole["variants"] = {graph, fixed, whole["variants"][0]};
    for (const auto& file : other["files"]) whole["files"].push_back(file);
    return {"a.bundle", mars::parse_manifest(whole.dump())};
}

std::string refusal(const mars::Bundle& from, const mars::Here& here) {
    return mars::why_not(from.variant("rtx"), "cuda", &here).value_or("it fits");
}

} // namespace

TEST_CASE("session and provider options of ONNX Runtime are distinguished by their names") {
    const auto parts = mars::parted({{"session.intra_op.allow_spinning", "0"}, {"device_id", "1"}}, false);
    CHECK(parts.entries == mars::OrtOptions{{"session.intra_op.allow_spinning", "0"}});
    CHECK(parts.of_provider == mars::OrtOptions{{"device_id", "1"}});
    CHECK_THROWS_WITH_AS(mars::parted({{"device_id", "1"}}, true), doctest::Contains("the CPU has no option device_id"),
                         mars::SessionError);
    CHECK_THROWS_WITH_AS(mars::parted({{"session.qdq_matmulnbits_accuracy_level", "0"}}, false),
                         doctest::Contains("the variant determines it"), mars::SessionError);
}

TEST_CASE("names of devices, and numbers of GPUs") {
    const auto named = [](const std::string& text) { return mars::DeviceName::of(text).text(); };
    CHECK(named("cpu") == "cpu");
    CHECK(named("CUDAExecutionProvider") == "cuda");
    CHECK(named("cuda:0") == "cuda");
    CHECK(named("CUDA:1") == "cuda:1");
    CHECK(named("cuda:07") == "cuda:7");
    CHECK(mars::DeviceName::of("cuda:12").ordinal() == 12);
    CHECK(mars::runs_engines("cuda:3"));
    for (const char* wrong : {"cuda:", "cuda:x", "cuda:-1", "cuda: 1", "cuda:1:2", "cuda:1.0", "cuda:99999", "cuda:18446744073709551617"})
        CHECK_THROWS_WITH_AS(mars::DeviceName::of(wrong), doctest::Contains("the part after the colon must be a GPU number"),
                             mars::SessionError);
    CHECK_THROWS_WITH_AS(mars::DeviceName::of("cpu:0"), "device `cpu:0`: the CPU has no number; give cpu", mars::SessionError);
    CHECK(mars::parted({}, false, 2).of_provider == mars::OrtOptions{{"device_id", "2"}});
    CHECK(mars::parted({{"device_id", "2"}}, false, 2).of_provider == mars::OrtOptions{{"device_id", "2"}});
    CHECK_THROWS_WITH_AS(mars::parted({{"device_id", "1"}}, false, 2), doctest::Contains("say it once, in the device"), mars::SessionError);
}

TEST_CASE("exceptions of on_log are dropped") {
    mars::note(nullptr, mars::LogLevel::info, "unseen");
    mars::note([](mars::LogLevel, std::string_view) { throw std::runtime_error("no"); }, mars::LogLevel::info, "dropped");
    std::string heard;
    mars::note([&](mars::LogLevel level, std::string_view line) { heard = level == mars::LogLevel::error ? line : ""; },
               mars::LogLevel::error, "here");
    CHECK(heard == "here");
}

TEST_CASE("an engine is preferred on a GPU, a graph elsewhere") {
    const mars::Bundle from = bundle();
    const mars::Here here = rtx_machine();
    CHECK(mars::choose(from, "cuda", &here).name == "rtx");
    CHECK(mars::choose(from, "CUDAExecutionProvider", &here).name == "rtx");
    CHECK(mars::choose(from, "cpu", &here).name == "onnx-fp32");
    CHECK(mars::choose(from, "openvino", &here).name == "onnx-fp32");
    CHECK(mars::choose_named(from, "onnx-fp32", "cuda", &here).name == "onnx-fp32");
    const mars::Bundle graphs{"b", mars::parse_manifest(valid().dump())};
    CHECK(mars::choose(graphs, "cuda", &here).name == "onnx-fp32");
}

TEST_CASE("each reason to refuse an engine names both values") {
    const mars::Bundle from = bundle();
    mars::Here here = rtx_machine();
    CHECK(refusal(from, here) == "it fits");
    here.tensorrt["tensorrt_rtx"] = "1.7.1.116";
    CHECK(refusal(from, here) ==
          "built with tensorrt_rtx 10.16.0.72, this libmars runs with 1.7.1.116; build the engine again or install 10.16.0.72");
    here.tensorrt = {{"tensorrt", "10.16.0.72"}};
    here.missing = {{"tensorrt_rtx", "no such file"}};
    const std::string none = "built with tensorrt_rtx 10.16.0.72, and libmars_tensorrt_rtx.so is not here (no such file); build libmars "
                             "with -DMARS_TENSORRT=ON and that TensorRT (docs/cpp.md)";
    CHECK(refusal(from, here) == none);
    here.gpu = "sm75"; // the other TensorRT's library has found a GPU
    CHECK(refusal(from, here) == none + "; built for sm86, sm89, this GPU is a Stub GPU (sm75); build it with --target host");
    here.tensorrt.clear(); // the search for one failed
    CHECK(refusal(from, here) == none);
    here = rtx_machine();
    here.gpu = "sm75";
    CHECK(refusal(from, here) == "built for sm86, sm89, this GPU is a Stub GPU (sm75); build it with --target host");
    nlohmann::json portable = engine_manifest({});
    portable["variants"][0]["engine"]["compute_capabilities"] = {"portable"};
    CHECK(refusal({"b", mars::parse_manifest(portable.dump())}, here) == "it fits");
    here = rtx_machine();
    here.driver = "11.8";
    here.platform = "linux-riscv64";
    CHECK(refusal(from, here) == "built on " + mars::this_platform() +
                                     ", this is linux-riscv64; build it here; its libraries are for CUDA 12, this driver supports CUDA "
                                     "11.8; update the driver");
    here = rtx_machine();
    here.no_gpu = "no NVIDIA GPU is visible";
    CHECK(refusal(from, here) == "no NVIDIA GPU is visible");
}

TEST_CASE("versions are compared as far as both have numbers") {
    const auto fits = [](const std::string& built, const std::string& runs) {
        nlohmann::json whole = engine_manifest({});
        whole["variants"][0]["engine"]["version"] = built;
        mars::Here here = rtx_machine();
        here.tensorrt["tensorrt_rtx"] = runs;
        return refusal({"b", mars::parse_manifest(whole.dump())}, here) == "it fits";
    };
    CHECK(fits("10.3.0", "10.3.0.30")); // JetPack 6
    CHECK(fits("10.7.0.post1", "10.7.0.23"));
    CHECK(fits("10.13.3.9.post1", "10.13.3.9"));
    CHECK(fits("10.16.0.72", "10.16.0.72"));
    CHECK_FALSE(fits("10.3.0", "10.3.1.30"));
    CHECK_FALSE(fits("10.3.0", "10.30.0.3"));
    CHECK_FALSE(fits("10.16.0.72", "10.16.0.7"));
    CHECK_FALSE(fits("1.10.3.0", "10.3.0.30"));
    CHECK_FALSE(fits("newest", "10.3.0.30"));
    CHECK_FALSE(fits("post1", "10.3.0.30"));
}

TEST_CASE("an engine that does not fit is an error; the graph does not replace it") {
    const mars::Bundle from = bundle();
    mars::Here here = rtx_machine();
    here.no_gpu = "no NVIDIA GPU is visible";
    CHECK_THROWS_WITH_AS(mars::choose(from, "cuda", &here),
                         "a.bundle: no variant runs here on cuda:\n  rtx: no NVIDIA GPU is visible\n  onnx-fp32: a graph for ONNX Runtime; "
                         "name it as the variant to run it all the same\n  fixed: its fixed shapes are for compilers; the "
                         "session runs the dynamic graph",
                         mars::SessionError);
    CHECK_THROWS_WITH_AS(mars::choose_named(from, "rtx", "cuda", &here),
                         "a.bundle: variant rtx does not run in this session: no NVIDIA GPU is visible", mars::SessionError);
    CHECK_THROWS_WITH_AS(mars::choose_named(from, "rtx", "cpu", &here),
                         "a.bundle: variant rtx does not run in this session: made for tensorrt_rtx: an engine runs on a GPU; give the "
                         "device cuda",
                         mars::SessionError);
    CHECK_THROWS_AS(mars::choose_named(from, "missing", "cpu", &here), mars::BundleError);
}

TEST_CASE("a graph for CUDA is chosen on CUDA, and graphs of CPUs and of TensorRT are refused there") {
    nlohmann::json whole = valid(), graph = whole["variants"][0];
    const std::string plain = graph["name"];
    graph["name"] = "fp16-cuda";
    graph["kv_layout"] = "cuda";
    whole["variants"].insert(whole["variants"].begin(), graph);
    const mars::Bundle from{"b", mars::parse_manifest(whole.dump())};
    CHECK(mars::choose(from, "cpu").name == plain);
    CHECK(mars::choose(from, "cuda:1").name == "fp16-cuda");
    CHECK(mars::choose_named(from, "fp16-cuda", "cpu").name == "fp16-cuda");
    mars::Variant odd = from.variant(plain);
    odd.kv_layout = "appended";
    CHECK(mars::why_not(odd, "cuda", nullptr) == "its KV layout is for TensorRT; export with --kv-layout in-place");
    CHECK(!mars::why_not(odd, "cpu", nullptr));
    odd.kv_layout = "in-place";
    odd.kv_dtype = "int8";
    CHECK(mars::why_not(odd, "cuda", nullptr) == "its int8 KV entries are for CPUs; export with --kv float");
}

TEST_CASE("an engine without a description of its device is refused") {
    nlohmann::json whole = engine_manifest({});
    whole["variants"][0].erase("engine");
    const mars::Bundle from{"b", mars::parse_manifest(whole.dump())};
    CHECK(refusal(from, rtx_machine()).find("does not say what it was built for") != std::string::npos);
    CHECK_THROWS_AS(mars::choose(from, "cpu"), mars::SessionError);
}

TEST_CASE("each field of an engine's manifest entry is checked") {
    const auto problem = [](const char* pointer, const nlohmann::json& value) -> std::string {
        nlohmann::json whole = engine_manifest({});
        whole["variants"][0]["engine"][nlohmann::json::json_pointer(pointer)] = value;
        try {
            mars::parse_manifest(whole.dump());
        } catch (const mars::BundleError& error) {
            return error.what();
        }
        return "";
    };
    CHECK(problem("/ranges", nlohmann::json::array()).find("engine.ranges: at least one is expected") != std::string::npos);
    CHECK(problem("/ranges/0/name", "both").find("engine.ranges[0].name") != std::string::npos);
    CHECK(problem("/ranges/1/batch/min", 9).find("min 9, opt 1, max 3 are not in order") != std::string::npos);
    CHECK(problem("/ranges/1/slots/max", 1LL << 40).find("engine.ranges[1].slots.max") != std::string::npos);
    CHECK(problem("/version", 10).find("engine.version") != std::string::npos);
    CHECK(problem("/compute_capabilities", "sm86").find("engine.compute_capabilities") != std::string::npos);
    CHECK(problem("/graph", "other.onnx").find("`other.onnx`, which `files` does not list") != std::string::npos);
    CHECK(problem("/something_newer", 1).empty());
}
