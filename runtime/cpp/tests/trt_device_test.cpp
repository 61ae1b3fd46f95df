// The GPU beneath the TensorRT backend, over the stub: which one, what it says of itself, and errors that stay.
#include <cstdlib>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include <mars/errors.hpp>

#include "device/engines.hpp"
#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/variants.hpp"
#include "machine.hpp"
#include "stub_bundle.hpp"

extern "C" const mars::EnginePlugin* mars_engine_plugin();

TEST_CASE("properties of the device") {
    stub::reset();
    const auto look_around = [](int gpu = 0) { return mars_engine_plugin()->look_around(gpu); };
    const mars::Here here = look_around();
    CHECK(here.gpu == "sm86");
    CHECK(here.driver == "12.9");
    CHECK(here.tensorrt == std::map<std::string, std::string>{{mars::tensorrt_flavor(), "10.16.0.72"}});
    stub::state().num_devices = 2;
    stub::state().others[1] = 75;
    CHECK(look_around(1).gpu == "sm75");
    CHECK(look_around(2).no_gpu == "no GPU 2 is visible: the last of 2 is 1 (CUDA_VISIBLE_DEVICES, nvidia-smi)");
    stub::state().num_devices = 0;
    CHECK(look_around().no_gpu == "no NVIDIA GPU is visible");
    stub::state().num_devices = -1;
    CHECK(look_around().no_gpu == "no NVIDIA GPU with a working driver was found (check with nvidia-smi)");
    stub::state().driver = 12020;
    CHECK(look_around().no_gpu ==
          "the CUDA runtime here is 12.6, this driver is for CUDA 12.2: update the driver, or use libraries of its CUDA");
    stub::state().driver = 0;
    CHECK(look_around().no_gpu == "no NVIDIA GPU with a working driver was found (check with nvidia-smi)");
}

TEST_CASE("the thread's current GPU does not matter and is restored") {
    EngineShape shape;
    shape.kv_layout = "appended";
    const Made made(shape);
    stub::current() = 3;
    {
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(2);
        mars::StepOutput output;
        for (int i = 0; i < 3; ++i) backend.step(*cache, 0, input(1, 2), false, output);
        cache->load(1, *cache->save(0, 2), 2);
        CHECK(backend.num_graphs() == 1);
        CHECK(stub::current() == 3);
    }
    CHECK(stub::state().memory.empty());
    CHECK(stub::state().streams == 0);
    CHECK(stub::current() == 3);
    stub::current() = 0;
}

TEST_CASE("a GPU is selected by its number and has its own memory, streams and contexts") {
    const Made made;
    stub::State& state = stub::state();
    state.num_devices = 2;
    state.others[0] = 75; // the engine is not for the first
    state.gpu = 1;        // everything that is done anywhere else fails
    const auto chosen = [&](const std::string& device) {
        const mars::Here here = mars_engine_plugin()->look_around(mars::DeviceName::of(device).ordinal());
        return mars::choose(made.bundle, device, &here).name;
    };
    CHECK(chosen("cuda:1") == "rtx");
    CHECK(chosen("CUDAExecutionProvider:1") == "rtx");
    CHECK(refused([&] { chosen("cuda"); }).find("this GPU is a Stub GPU (sm75)") != std::string::npos);
    CHECK(refused([&] { chosen("cuda:2"); }).find("no GPU 2 is visible: the last of 2 is 1") != std::string::npos);
    {
        const auto backend = mars_engine_plugin()->open(made.bundle, made.bundle.manifest.variants.front(), {1});
        fake::Backend reference(fake::hashed, backend->max_capacity(), backend->max_slots());
        for (int i = 0; i < 3; ++i) CHECK(answers(*backend, prompts) == answers(reference, prompts));
        CHECK(state.launches > 0);
        CHECK(stub::current() == 0);
    }
    CHECK(state.memory.empty());
    CHECK(state.locked.empty());
    CHECK(state.streams == 0);
    CHECK(refused([&] { made.open(); }).find("cudaErrorInvalidResourceHandle") != std::string::npos);
}

TEST_CASE("an engine runs on the caller's stream") {
    const Made made;
    const mars::Variant& variant = made.bundle.manifest.variants.front();
    fake::Backend reference(fake::hashed, 64, std::nullopt);
    mars::EngineOptions options;
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    options.stream = stream;
    {
        mars::TrtBackend backend(made.bundle, variant, options);
        for (int i = 0; i < 3; ++i) CHECK(answers(backend, prompts) == answers(reference, prompts));
        CHECK(stub::state().streams == 1);
        CHECK(stub::state().launches > 0);
    }
    CHECK(stub::state().streams == 1); // it is still the caller's
    cudaStreamDestroy(stream);
}

TEST_CASE("a GPU that shares system memory allocates no more than is available") {
    const Made made;
    stub::state().is_integrated = true;
    const mars::Device device(0);
    CHECK(std::abs(*device.free_memory() - *mars::available_memory()) < (std::int64_t{1} << 30)); // other processes allocate meanwhile
    CHECK(refused([&] { device.require(std::size_t{1} << 50); }).find("the GPU shares the system's memory: 1125899906 MB are needed") == 0);
    device.require(std::size_t{1} << 20);
    stub::state().is_integrated = false;
    mars::Device(0).require(std::size_t{1} << 50); // CUDA says no itself
    CHECK(*mars::Device(0).free_memory() == std::int64_t{8} << 30);
}

TEST_CASE("a permanent CUDA error is reported, and closing afterwards raises no error") {
    const Made made;
    {
        mars::TrtBackend backend = made.open();
        auto cache = backend.new_cache(2);
        const auto saved = cache->save(0, 1);
        mars::StepOutput output;
        for (int i = 0; i < 3; ++i) backend.step(*cache, 0, input(1, 2), false, output);
        stub::state().breaks = true; // TensorRT meets it first
        for (int i = 0; i < 2; ++i) {
            const std::string text = refused([&] { backend.step(*cache, 0, input(1, 1), false, output); });
            CHECK(text.find("an illegal memory access was encountered (cudaErrorIllegalAddress); this process cannot use the GPU "
                            "any more: restart it") != std::string::npos);
        }
        CHECK_THROWS_AS(backend.step(*cache, 0, input(1, 1), false, output), mars::DeviceLost);
        CHECK(refused([&] { cache->move(0, 1, 2); }).find("restart it") != std::string::npos);
        CHECK(refused([&] { backend.new_cache(1)->reserve(1); }).find("restart it") != std::string::npos);
    }
    stub::reset();
}

TEST_CASE("permanent CUDA errors are recognized by name and by number") {
    CHECK(mars::is_lasting("Non-zero status code returned while running Attention node. CUDA failure 700: an illegal memory access"));
    CHECK(mars::is_lasting("CUDA error 719 at ..."));
    CHECK(mars::is_lasting("cudaErrorLaunchFailure:unspecified launch failure"));
    for (const char* other : {"CUDA failure 2: out of memory ; GPU=0", "a graph of 700 nodes", "CUDA failure 7001: x", "CUDA failure 700"})
        CHECK(mars::is_lasting(other) == (std::string(other) == "CUDA failure 700"));
}
