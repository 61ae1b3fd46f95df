// The shapes of a TensorRT engine's steps: its ranges, and what a step is filled up to.
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "device/shape_bucket.hpp"
#include "stub_bundle.hpp"

TEST_CASE("ranges are chosen by shape") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    const auto ranges = [] {
        std::vector<std::int64_t> all;
        for (const stub::Bound* context : stub::state().contexts) all.push_back(context->range);
        return all;
    };
    CHECK(ranges() == Tokens{0, 0, 0, 1}); // made when it was opened: the smallest, the best and the largest step; prefill
    backend.step(*cache, 0, input(1, 1), false, output);
    backend.step(*cache, 0, input(3, 1), false, output);
    backend.step(*cache, 1, input(1, 1), false, output);
    CHECK(ranges().size() == 4); // other rows, the same context
    backend.step(*cache, 0, input(3, 7), false, output);
    CHECK(ranges() == Tokens{0, 0, 0, 1, 0}); // of one prediction
    backend.step(*cache, 0, input(1, 8), false, output);
    backend.step(*cache, 0, input(2, 16), false, output);
    backend.step(*cache, 2, input(1, 16), false, output);
    CHECK(ranges().size() == 5); // prefill, one context for all
    const stub::Bound& last = *stub::state().contexts[3];
    CHECK(last.shapes.at("input_ids") == stub::Shape{1, 16});
    CHECK(last.shapes.at("past_key_values.1.value") == stub::Shape{1, 2, 64, 4});
    const auto& lent = memory(*cache);
    CHECK(reinterpret_cast<mars::Address>(last.addresses.at("past_key_values.0.key")) == lent.addresses[0] + 2 * lent.row_bytes);
    CHECK(refused([&] { backend.step(*cache, 0, input(1, 17), false, output); }) ==
          "a step of 1 x 17 slots with 1 predictions is beyond this engine (decode: 1-3 x 1-7; prefill: 1-3 x 1-16; at most 4 "
          "predictions); build one with a larger --batch, --prefill or --block");
}

TEST_CASE("steps are padded to a few sizes") {
    for (const char* layout : {"in-place", "appended"}) {
        CAPTURE(layout);
        EngineShape shape;
        shape.kv_layout = layout;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(1);
        Tokens known;
        mars::StepOutput output;
        for (const std::int64_t slots : {1, 2, 3, 4, 5, 6, 7, 1, 3, 6, 7, 7, 7, 3, 2}) {
            mars::StepInput window = input(1, slots, static_cast<std::int64_t>(known.size()) + 3);
            window.kv_length = {static_cast<std::int64_t>(known.size())};
            known.insert(known.end(), window.input_ids.begin(), window.input_ids.end());
            for (std::int64_t count = 1; count <= std::min(slots, std::int64_t{4}); ++count) {
                window.outputs = count;
                window.output_index.assign(static_cast<std::size_t>(count), slots - 1);
                backend.step(*cache, 0, window, false, output);
                CHECK(output.token_ids == Tokens(static_cast<std::size_t>(count), fake::hashed(known, 0).first));
            }
        }
        CHECK(known.size() == 64);
        std::set<std::int64_t> sizes;
        for (const stub::Bound* context : stub::state().contexts)
            if (context != nullptr && context->range == 0 && context->shapes.count("input_ids") > 0)
                sizes.insert(context->shapes.at("input_ids")[1]);
        CHECK(sizes == std::set<std::int64_t>{1, 2, 4, 7}); // 2 at the end of the row, which has no room for padding
        CHECK(backend.num_graphs() <= 10);
    }
}

TEST_CASE("pieces of a prompt are padded to powers of two") {
    EngineShape shape;
    shape.prefill = 100;
    const auto manifest = mars::parse_manifest(engine_manifest(shape).dump());
    const mars::ShapeBucket shape_bucket(*manifest.variants.front().engine, 200, false);
    const auto slots = [&](std::int64_t asked, std::int64_t length) {
        mars::StepInput window = input(1, asked);
        window.kv_length = {length};
        const auto filled = shape_bucket.filled(window);
        return filled ? filled->slots : asked;
    };
    std::vector<std::int64_t> made;
    for (const std::int64_t asked : {8, 16, 17, 33, 64, 65, 99, 100}) made.push_back(slots(asked, 0));
    CHECK(made == std::vector<std::int64_t>{16, 16, 32, 64, 64, 100, 100, 100});
    CHECK(slots(20, 170) == 20); // 32 slots would write beyond the row
}

TEST_CASE("padding of an engine with fixed sizes does not change entries") {
    EngineShape shape;
    shape.fixed = true;
    const Made made(shape);
    mars::TrtBackend backend = made.open();
    CHECK(backend.max_capacity() == 60);
    CHECK(backend.max_slots() == 4);
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    mars::StepInput window = input(1, 2);
    window.input_ids = {8, 9};
    window.output_index = {1};
    backend.step(*cache, 1, window, false, output);
    CHECK(output.token_ids == Tokens{fake::hashed({8, 9}, 0).first});
    const float* keys = kv(dynamic_cast<mars::GpuCache&>(*cache), 0);
    const std::int64_t row = 2 * 64 * 4;
    CHECK(keys[row] == 8);
    CHECK(keys[row + 4] == 9);
    CHECK(std::count(keys, keys + row, 0.0F) == row);
    for (std::int64_t other = 2; other < 5; ++other) // padding rows write to the end only
        CHECK(std::count(keys + other * row, keys + other * row + 60 * 4, 0.0F) == 60 * 4);
    CHECK(refused([&] { backend.step(*cache, 0, input(1, 5), false, output); }) ==
          "a step of 1 x 5 slots; this engine is for exactly 3 x 4");
}
