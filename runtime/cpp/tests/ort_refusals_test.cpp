// Where ONNX Runtime's CUDA provider refuses to capture steps, fails, or replays something else: over a stub of the provider, on the bundle that
// MARS_BUNDLE names.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "device/ort_graphs.hpp"
#include "stub_gpu.hpp"

namespace {

const std::string block_refusal = "This session cannot use the graph capture feature as requested by the user as all compute graph nodes "
                                  "have not been partitioned to the "
                                  "CUDAExecutionProvider";

} // namespace

TEST_CASE("where capturing is refused the session opens without, and says why") {
    Gpu gpu;
    gpu.stub.refusal = block_refusal;
    Served served(gpu.opened());
    CHECK(served.backend.why_no_graphs() == block_refusal);
    CHECK(gpu.has_said("steps are not captured: " + block_refusal));
    CHECK(gpu.stub.options[0].count("enable_cuda_graph") == 1);
    CHECK(gpu.stub.options[1].count("enable_cuda_graph") == 0);
    check_answers(served.session, config_of(0.5));
    CHECK(served.backend.num_graphs() == 0);
    CHECK(gpu.stub.runs.empty());
}

TEST_CASE("a session that cannot open at all is an error; so is the option of another provider") {
    Gpu gpu;
    gpu.stub.no_session = "CUDA failure 100: no CUDA-capable device is detected";
    CHECK_THROWS_WITH_AS(gpu.opened(), doctest::Contains("no CUDA-capable device"), mars::SessionError);
    gpu.stub.no_session = "CUDA failure 700: an illegal memory access was encountered";
    CHECK_THROWS_WITH_AS(gpu.opened(), doctest::Contains("CUDA failure 700"), mars::DeviceLost);
    CHECK(mars::asks_for_graphs("CUDAExecutionProvider", {{"enable_cuda_graph", "True"}}));
    CHECK_FALSE(mars::asks_for_graphs("CUDAExecutionProvider", {{"enable_cuda_graph", "0"}}));
    CHECK_FALSE(mars::asks_for_graphs("NvTensorRTRTXExecutionProvider", {{"enable_cuda_graph", "0"}}));
    for (const char* name : {"enable_cuda_graph", "trt_cuda_graph_enable"})
        CHECK_THROWS_WITH_AS(mars::asks_for_graphs("TensorrtExecutionProvider", {{name, "1"}}),
                             doctest::Contains("would replay the first step for all others"), mars::SessionError);
}

TEST_CASE("replays that say something else are found before anybody is served") {
    // The attack: an operator on the CPU computes with a value of the inputs, which a replay does not see. It says wrong things, and writes
    // entries over those of tokens long accepted.
    const std::string why = "a replayed step does not say what the same step says plainly";
    for (const bool is_stale : {true, false}) {
        Gpu gpu;
        gpu.stub.is_stale = is_stale;
        if (!is_stale) gpu.stub.on_host = [](const std::string& name) { return name == "output_index"; };
        Served served(gpu.opened());
        CHECK(served.backend.why_no_graphs() == why);
        CHECK(gpu.has_said("steps are not captured: " + why));
        const std::size_t tried = gpu.stub.runs.size();
        check_answers(served.session, config_of(0.3));
        CHECK(gpu.numbers(tried) == std::set<std::int64_t>{-1});
        CHECK(served.backend.num_graphs() == 0);
    }
}

TEST_CASE("a capture or replay that fails ends nothing but replaying") {
    const std::string words = "CUDA failure 901: operation failed due to a previous error during capture";
    for (const std::size_t nth : {1, 5, 7, 20, 30, 50}) {
        CAPTURE(nth);
        Gpu gpu;
        gpu.stub.failing = nth;
        gpu.stub.failure = words + "\nand what else there is to say";
        Served served(gpu.opened());
        for (int i = 0; i < 3; ++i) check_answers(served.session, config_of(0.3));
        CHECK(served.backend.why_no_graphs() == "a step could not be captured or replayed: " + words);
        CHECK(served.backend.num_graphs() == 0);
    }
}

TEST_CASE("an error that stays is told, in a step and when a session is opened") {
    for (const std::size_t nth : {5, 40}) {
        Gpu gpu;
        gpu.stub.failing = nth;
        gpu.stub.failure = "CUDA failure 700: an illegal memory access was encountered";
        const auto all = [&] {
            Served served(gpu.opened());
            for (int i = 0; i < 4; ++i) served.session.generate(prompts[0], config_of(0.3));
        };
        CHECK_THROWS_WITH_AS(all(), doctest::Contains("CUDA failure 700"), mars::DeviceLost);
    }
}

TEST_CASE("KV rows that cannot stay on the GPU are captured nowhere") {
    Gpu gpu;
    gpu.stub.on_host = [](const std::string& name) { return name.rfind("past_key_values.", 0) == 0; };
    Served served(gpu.opened());
    CHECK_FALSE(served.backend.is_on_device());
    CHECK(served.backend.why_no_graphs() == "a step's inputs or results are not all on the GPU");
    check_answers(served.session, config_of(0.3));
    CHECK(gpu.numbers(0) == std::set<std::int64_t>{-1});
}
