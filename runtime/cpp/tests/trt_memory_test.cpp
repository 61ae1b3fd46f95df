// KV memory of the TensorRT backend over the stub: allocated once, lent, cleared, moved, saved, given back, and refused.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "decode/batch.hpp"
#include "decode/prefix.hpp"
#include "stub_bundle.hpp"

TEST_CASE("memory is allocated once and freed with the backend") {
    const Made made;
    {
        mars::TrtBackend backend = made.open();
        answers(backend, prompts);
        const std::size_t before = stub::state().allocations.size();
        for (int i = 0; i < 20; ++i) answers(backend, {prompts[0], prompts[1]}, 1, 6);
        CHECK(stub::state().allocations.size() == before);
        const auto lazy = backend.new_cache(3);
        CHECK(lazy->capacity() == 0);
        CHECK(stub::state().allocations.size() == before); // nothing before it is used
        const auto one = backend.new_cache(1), two = backend.new_cache(1);
        CHECK(memory(*one).addresses != memory(*two).addresses);
        const auto& sizes = stub::state().allocations;
        const std::size_t row = 2U * 2 * 2 * 64 * 4 * 4;             // of all tensors
        CHECK(std::count(sizes.begin(), sizes.end(), 3 * row) == 1); // what was given back serves again
        CHECK(std::count(sizes.begin(), sizes.end(), row) == 1);     // one row takes the memory of one
    }
    CHECK(stub::state().memory.empty());
    CHECK(stub::state().locked.empty());
    CHECK(stub::state().streams == 0);
    CHECK(stub::state().forgotten == stub::state().graphs);
    CHECK(stub::state().graphs > 0);
    CHECK(stub::state().orphans == 0); // graphs go before the contexts that they were captured from
    for (const stub::Bound* context : stub::state().contexts) CHECK(context == nullptr);
}

TEST_CASE("a cache may outlive its backend") {
    const Made made;
    auto backend = std::make_unique<mars::TrtBackend>(made.bundle, made.bundle.manifest.variants.front());
    auto cache = backend->new_cache(2);
    cache->reserve(1);
    backend.reset();
    cache->move(0, 1, 2);
    cache.reset();
    CHECK(stub::state().memory.empty());
}

TEST_CASE("reused memory contains no old entries") {
    const Made made;
    mars::TrtBackend backend = made.open();
    auto cache = backend.new_cache(2);
    const auto addresses = memory(*cache).addresses;
    const std::size_t row = memory(*cache).row_bytes / sizeof(float);
    const float infinite = std::numeric_limits<float>::infinity();
    mars::StepOutput output;
    backend.step(*cache, 0, input(1, 1), false, output); // clears are on the stream
    for (const mars::Address address : addresses) std::fill_n(reinterpret_cast<float*>(address), 2 * row, infinite);
    cache->release(1);
    backend.step(*cache, 0, input(1, 1), false, output);
    for (const mars::Address address : addresses) {
        const float* entries = reinterpret_cast<const float*>(address);
        CHECK(entries[row - 1] == infinite);
        CHECK(std::count(entries + row, entries + 2 * row, 0.0F) == static_cast<std::ptrdiff_t>(row));
    }
    cache.reset();
    cache = backend.new_cache(1);
    CHECK(memory(*cache).addresses == addresses);
    backend.step(*cache, 0, input(1, 1), false, output); // clears are on the stream
    const float* entries = reinterpret_cast<const float*>(addresses[0]);
    CHECK(std::count(entries, entries + 2 * 64 * 4, 0.0F) == 2 * 64 * 4 - 2 * 4);
}

TEST_CASE("memory is not reused if it cannot be cleared") {
    const Made made;
    mars::TrtBackend backend = made.open();
    backend.new_cache(2)->reserve(1);
    const std::size_t before = stub::state().allocations.size();
    stub::state().is_broken = true;
    CHECK_THROWS_AS(backend.new_cache(2)->reserve(1), mars::DeviceError);
    stub::state().is_broken = false;
    backend.new_cache(2)->reserve(1);
    CHECK(stub::state().allocations.size() == before);
}

TEST_CASE("idle memory is freed when memory is short, and no step stays bound to it") {
    const Made made;
    mars::TrtBackend backend = made.open();
    mars::StepOutput output;
    auto one = backend.new_cache(1);
    const auto first = reinterpret_cast<unsigned char*>(memory(*one).addresses.front());
    const std::size_t size = stub::state().memory.at(first);
    for (int i = 0; i < 3; ++i)
        for (const std::int64_t slots : {4, 16}) backend.step(*one, 0, input(1, slots), false, output);
    CHECK(backend.num_graphs() == 1);
    one.reset();
    const auto three = backend.new_cache(3);
    three->reserve(1);
    const auto there = stub::state().memory.find(first);                   // the same address may be other memory by now
    CHECK((there == stub::state().memory.end() || there->second != size)); // three rows beside the idle one are more than the engine takes
    CHECK(backend.num_graphs() == 0);
    CHECK(stub::state().orphans == 0);
    for (int i = 0; i < 3; ++i)
        for (const std::int64_t slots : {4, 16}) backend.step(*three, 0, input(1, slots), false, output);
    CHECK(output.token_ids == Tokens{fake::hashed({3}, 0).first});

    // A shortage is reported with its size and loses no entries; idle memory is freed first.
    stub::state().has_no_memory = true;
    const std::size_t before = stub::state().memory.size();
    const auto more = backend.new_cache(1);
    CHECK(refused([&] { more->reserve(1); }) ==
          "not enough memory: the KV entries of 1 row(s) of 64 take 0 MB (CUDA: cudaMalloc failed: out of memory "
          "(cudaErrorMemoryAllocation)); shorten the prompt or max_new_tokens, run fewer rows at once, or free memory");
    CHECK(stub::state().memory.size() == before);
}

TEST_CASE("unaligned rows are refused before TensorRT is called") {
    EngineShape shape;
    shape.capacity = 63;
    const Made made(shape);
    mars::TrtBackend backend = made.open();
    CHECK(refused([&] { backend.new_cache(2); }).find("do not begin at multiples of 256 bytes; build it again with a --capacity") !=
          std::string::npos);
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids.size() == 1);
}

TEST_CASE("rows and entries beyond the engine's limits are refused") {
    const Made made;
    mars::TrtBackend backend = made.open();
    CHECK(refused([&] { backend.new_cache(4); }) == "4 rows, but this engine was built for at most 3; build it again with --batch 4");
    const auto cache = backend.new_cache(1);
    cache->reserve(64);
    CHECK(refused([&] { cache->reserve(65); }).find("would write entry 65 of a row, this engine holds 64") != std::string::npos);
    stub::state().has_no_memory = true;
    const std::size_t before = stub::state().memory.size();
    CHECK(refused([&] { backend.new_cache(1)->reserve(1); }).find("out of memory") != std::string::npos);
    CHECK(stub::state().memory.size() == before);
}

TEST_CASE("a row is moved with all its heads") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    mars::StepInput window = input(1, 3);
    window.input_ids = {8, 9, 10};
    backend.step(*cache, 2, window, false, output);
    cache->move(2, 0, 2);
    cache->move(2, 1, 0);
    backend.step(*cache, 2, window, false, output);
    auto& moved = dynamic_cast<mars::GpuCache&>(*cache);
    for (const std::size_t head : {0U, 1U}) {
        const float* entries = kv(moved, 3) + head * 64 * 4;
        CHECK(entries[0] == 8);
        CHECK(entries[7] == 9);
        CHECK(std::count(entries + 8, entries + 64 * 4, 0.0F) == 62 * 4);
    }
    CHECK(std::count(kv(moved, 3) + 2 * 64 * 4, kv(moved, 3) + 4 * 64 * 4, 0.0F) == 2 * 64 * 4);
}

TEST_CASE("a copy between rows is one call, and new entries take one call a row") {
    const auto copies = [] {
        std::vector<std::size_t> sizes;
        for (const auto& [kind, size] : stub::state().events)
            if (kind == "copy") sizes.push_back(size);
        stub::state().events.clear();
        return sizes;
    };
    const std::size_t entries = 2 * 2 * 2 * 4 * sizeof(float);
    for (const bool fixed : {false, true}) {
        CAPTURE(fixed);
        EngineShape shape;
        shape.kv_layout = "appended";
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(3);
        auto& rows = dynamic_cast<mars::GpuCache&>(*cache);
        mars::StepOutput output;
        std::int64_t length = 0;
        for (const std::int64_t slots : {1, 3, 4}) // sizes whose tensors would not begin where they may without a gap
            for (int i = 0; i < 3; ++i, length += slots) {
                mars::StepInput window = input(2, slots, slots + 3);
                window.kv_length = {length, length};
                stub::state().events.clear();
                backend.step(*cache, 1, window, false, output);
                const std::size_t written = entries * static_cast<std::size_t>(fixed || slots > 1 ? 4 : 1);
                CHECK(copies() == std::vector<std::size_t>{written, written});
            }
        for (std::size_t tensor = 0; tensor < 4; ++tensor)
            for (std::int64_t head = 2; head < 6; ++head)
                for (std::int64_t entry = 0; entry < 24; ++entry)
                    CHECK(kv(rows, tensor)[(head * 64 + entry) * 4 + 3] == static_cast<float>(entry < 3 ? 4 : entry < 12 ? 6 : 7));
        cache->move(1, 2, 5);
        cache->move(1, 1, 5); // onto itself: nothing
        cache->load(0, *cache->save(1, 6), 4);
        backend.step(*cache, 1, input(1, 1), false, output);
        const auto sizes = copies();
        REQUIRE(sizes.size() == 4);
        CHECK(std::vector<std::size_t>(sizes.begin(), sizes.begin() + 3) ==
              std::vector<std::size_t>{5 * entries, 6 * entries, 4 * entries});
        for (std::size_t tensor = 0; tensor < 4; ++tensor) {
            CHECK(kv(rows, tensor)[(64 + 3) * 4] == 6.0F);
            CHECK(kv(rows, tensor)[(64 + 4) * 4] == 0.0F);
        }
    }
}

TEST_CASE("saved entries stay on the device, serve other rows, and are freed with the prefix cache") {
    const Tokens history{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
    for (const char* layout : {"in-place", "appended"}) {
        CAPTURE(layout);
        EngineShape shape;
        shape.kv_layout = layout;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        CHECK(!backend.reproducible_slots()); // an engine has kernels by the size of a step
        const std::int64_t piece = std::min<std::int64_t>(256, backend.max_slots().value());
        REQUIRE(piece < static_cast<std::int64_t>(history.size()));
        std::vector<Tokens> asked;
        for (const std::int64_t last : {1, 2, 3}) {
            asked.push_back(history);
            asked.back().push_back(last);
        }
        const std::vector<Tokens> expected = answers(backend, asked);
        const std::size_t before = stub::state().memory.size();
        {
            mars::PrefixCache store(1 << 20, backend.reproducible_slots());
            for (int round = 0; round < 2; ++round) CHECK(answers(backend, asked, 1, 20, &store) == expected);
            const mars::PrefixStats stats = store.stats();
            CHECK(stats.hits == 5);
            CHECK(stats.hit_tokens == 5 * ((static_cast<std::int64_t>(history.size())) / piece * piece));
            CHECK(stats.failed == 0);
            CHECK(stub::state().memory.size() == before + static_cast<std::size_t>(stats.entries));
        }
        CHECK(stub::state().memory.size() == before);
    }
    // Without memory for a copy, nothing is saved and the answer goes on.
    const Made made;
    mars::TrtBackend backend = made.open();
    const std::vector<Tokens> expected = answers(backend, {history});
    mars::PrefixCache store(1 << 20, backend.reproducible_slots());
    stub::state().has_no_memory = true;
    CHECK(answers(backend, {history}, 1, 20, &store) == expected);
    CHECK(store.stats().failed > 0);
    CHECK(store.stats().num_bytes == 0);
    stub::state().has_no_memory = false;
}
