// Steps that the TensorRT backend captures: whose they are, when the oldest goes, and what is not captured.
#include <algorithm>

#include <doctest/doctest.h>

#include "stub_bundle.hpp"

TEST_CASE("a captured step belongs to its rows and memory and is dropped when its context is bound to others") {
    EngineShape shape;
    shape.block = 40;
    shape.capacity = 128;
    const Made made(shape);
    mars::TrtBackend backend = made.open();
    const auto one = backend.new_cache(2), two = backend.new_cache(2);
    mars::StepOutput output;
    for (const auto* cache : {&one, &two})
        for (const std::int64_t first : {0, 1})
            for (int i = 0; i < 3; ++i) backend.step(**cache, first, input(1, 2, 4 + first), false, output);
    CHECK(stub::state().graphs == 4);
    // Near the end of its row a step keeps its own size.
    for (int i = 0; i < 2; ++i)
        for (std::int64_t slots = 1; slots <= 65; ++slots) {
            mars::StepInput window = input(1, slots);
            window.kv_length = {128 - slots};
            backend.step(*one, 0, window, false, output);
        }
    CHECK(backend.num_graphs() <= 32);
    CHECK(stub::state().forgotten >= 4);
}

TEST_CASE("contexts take a bounded share of free memory") {
    EngineShape shape;
    shape.block = 40;
    shape.capacity = 128;
    const Made made(shape);
    stub::state().context_bytes = std::size_t{200} << 20;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    for (std::int64_t slots = 1; slots <= 65; ++slots) {
        mars::StepInput window = input(1, slots);
        window.kv_length = {128 - slots};
        backend.step(*cache, 0, window, false, output);
    }
    const auto& contexts = stub::state().contexts;
    CHECK(std::count_if(contexts.begin(), contexts.end(), [](const stub::Bound* context) { return context != nullptr; }) ==
          5); // an eighth of 8 GiB
}

TEST_CASE("a failed CUDA call leaves no error for TensorRT") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    cache->reserve(1);
    stub::state().has_no_memory = true;
    CHECK(refused([&] { cache->save(0, 1); }).find("out of memory") != std::string::npos);
    mars::StepOutput output;
    for (int i = 0; i < 3; ++i) backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(backend.num_graphs() == 1);
}

TEST_CASE("a step that would allocate is not captured") {
    const Made made;
    mars::TrtBackend backend = made.open();
    stub::state().allocates = true;
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    for (int i = 0; i < 4; ++i) backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(backend.num_graphs() == 0);
    CHECK(stub::state().launches == 0);
    CHECK(output.token_ids == Tokens{fake::hashed({3}, 0).first});
}
