// The stub of TensorRT and CUDA refuses what the real libraries refuse: what the tests over it rest on.
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "device/trt/cuda.hpp"
#include "device/trt/engine.hpp"
#include "stub_bundle.hpp"

TEST_CASE("the stub refuses invalid calls as TensorRT and CUDA do") {
    const Made made;
    mars::Device device;
    const mars::LoadedEngine engine(made.bundle, made.bundle.manifest.variants.front(), 0);
    const mars::Address scratch = device.allocate(engine.scratch_bytes());
    std::map<std::string, std::vector<std::int64_t>> shapes{{"input_ids", {1, 2}}, {"kv_length", {1}}, {"output_index", {1, 1}}};
    std::map<std::string, mars::Address> addresses;
    for (const mars::EngineTensor& tensor : engine.tensors()) {
        if (tensor.name.rfind("past_key_values.", 0) == 0) shapes[tensor.name] = {1, 2, 64, 4};
        if (tensor.alias.empty()) addresses[tensor.name] = device.allocate(2 * 64 * 4 * 4);
    }
    for (const mars::EngineTensor& tensor : engine.tensors())
        if (!tensor.alias.empty()) addresses[tensor.name] = addresses.at(tensor.alias);
    const auto bound = [&](const std::string& without = "") {
        auto context = std::make_unique<mars::Context>(engine.new_context(0, scratch, device.stream()));
        for (const auto& [name, shape] : shapes)
            if (name != without) CHECK(context->set_input_shape(name, shape));
        for (const auto& [name, address] : addresses) CHECK(context->set_tensor_address(name, address));
        return context;
    };
    const auto enqueues = [&](mars::Context& context) { return context.enqueue(device.stream()); };
    const auto reason = [&](mars::Context& context) { return enqueues(context) ? "nothing" : engine.last_error(); };
    const auto good = bound();
    for (const auto& each : shapes) CHECK(reason(*bound(each.first)) == "no shape for " + each.first);
    for (const auto& [name, address] : addresses)
        for (const mars::Address odd : {mars::Address{0}, address + 64}) {
            const auto context = bound();
            context->set_tensor_address(name, odd);
            CHECK(reason(*context).find("not aligned") != std::string::npos);
        }
    CHECK(!good->set_input_shape("input_ids", {4, 2}));
    const auto apart = bound();
    apart->set_tensor_address("present.1.key", addresses.at("present.0.key"));
    CHECK(reason(*apart).find("past and present are one address") != std::string::npos);

    // A first run, then a capture; a graph goes with what it was captured from.
    const auto capture = [&](mars::Context& context) { return device.capture([&] { return enqueues(context); }); };
    CHECK(capture(*good) == nullptr);
    CHECK(engine.last_error().find("the first run after a change") != std::string::npos);
    CHECK(reason(*good) == "nothing");
    device.synchronize();
    auto graph = capture(*good);
    REQUIRE(graph != nullptr);
    device.launch(graph);
    good->set_input_shape("input_ids", {1, 1});
    CHECK(refused([&] { device.launch(graph); }).find("cudaGraphLaunch failed") != std::string::npos);
    auto other = bound();
    CHECK(enqueues(*other));
    device.synchronize();
    graph = capture(*other);
    REQUIRE(graph != nullptr);
    other.reset();
    CHECK(refused([&] { device.launch(graph); }).find("cudaGraphLaunch failed") != std::string::npos);
    CHECK(stub::state().orphans == 0);
    graph.reset();
    CHECK(stub::state().orphans == 1);

    // Calls that do not belong in a capture invalidate it.
    const std::vector<std::function<void()>> calls{
        [&] { device.allocate(1); }, [&] { device.zero(scratch, 1); }, [&] { device.upload(scratch, &shapes, 1); },
        [&] { device.copy_runs({scratch, 8, 1}, {scratch + 8, 8, 1}, 8, 1, 1); }, [&] { device.synchronize(); }};
    for (const auto& call : calls) {
        const auto spoiled = device.capture([&] {
            CHECK(refused(call) != "nothing was refused");
            return true;
        });
        CHECK(spoiled == nullptr);
    }
    // Copies that CUDA refuses, or garbles.
    CHECK(refused([&] { device.copy_runs({scratch, 8, 2}, {scratch + 256, 7, 2}, 8, 2, 2); }).find("failed") != std::string::npos);
    CHECK(refused([&] { device.copy_runs({scratch, 8, 1}, {scratch + 256, 8, 2}, 8, 2, 2); }).find("failed") != std::string::npos);
    device.copy_runs({scratch, 8, 2}, {scratch + 12, 8, 2}, 8, 2, 2);
    CHECK_THROWS_AS(device.synchronize(), std::logic_error);
    // Another GPU of the thread's.
    stub::current() = 1;
    CHECK(refused([&] { device.synchronize(); }).find("cudaErrorInvalidResourceHandle") != std::string::npos);
    CHECK(reason(*bound()) == "another GPU is the current one");
    stub::current() = 0;
}
