// KV rows of ONNX Runtime in the memory of a device, tried with the CPU as the device: the same allocators, bindings and copying graphs as on
// a GPU, all but the names of its memory. MARS_BUNDLE is a bundle of this project's (tests/runtime/cpp/test_cpp_ort_device.py makes them).
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "answers.hpp"
#include "config.hpp"
#include "device/ort.hpp"
#include "device/ort_memory.hpp"
#include "device/ort_open.hpp"
#include "device/ort_rows.hpp"
#include "named_bundle.hpp"

namespace {

using Bytes = std::vector<unsigned char>;
using Said = std::vector<std::string>;

const mars::OrtPlace as_device{"Cpu", "Cpu", "Cpu", 0};

std::unique_ptr<mars::OrtBackend> opened(const std::optional<mars::OrtPlace>& place, mars::OnLog on_log = nullptr) {
    const mars::Bundle found = bundle();
    return std::make_unique<mars::OrtBackend>(found, found.manifest.variants.front(), "cpu", 1, mars::OrtOptions{}, std::move(on_log),
                                              place);
}

/// A step of two rows over `slots` tokens from entry `start` on.
mars::StepOutput step(mars::Backend& backend, mars::Cache& cache, std::int64_t start, std::int64_t slots, bool want_logits = false,
                      bool want_topk = false) {
    mars::StepInput input{2, slots, slots, {}, {start, start}, {}, want_topk};
    for (const std::int64_t seed : {0, 1}) {
        const auto ids = some_ids(start + slots, seed);
        input.input_ids.insert(input.input_ids.end(), ids.begin() + start, ids.end());
        for (std::int64_t i = 0; i < slots; ++i) input.output_index.push_back(i);
    }
    cache.reserve(start + slots);
    mars::StepOutput output;
    backend.step(cache, 0, input, want_logits, output);
    return output;
}

void check_equal(const mars::StepOutput& one, const mars::StepOutput& other) {
    CHECK(one.token_ids == other.token_ids);
    CHECK(one.confidence == other.confidence);
    CHECK(one.margin == other.margin);
    CHECK(one.entropy == other.entropy);
    CHECK(one.logits == other.logits);
    CHECK(one.topk_ids == other.topk_ids);
    CHECK(one.topk_logprobs == other.topk_logprobs);
    CHECK(one.top_k == other.top_k);
}

mars::Session session_over(const std::optional<mars::OrtPlace>& place, std::int64_t cache_bytes) {
    return mars::Opened::over(bundle(), opened(place), std::nullopt, cache_bytes);
}

} // namespace

TEST_CASE("rows on a device give the numbers of rows on the host: wider steps, more entries, other outputs") {
    const auto host = opened(std::nullopt), device = opened(as_device);
    CHECK_FALSE(host->is_on_device());
    REQUIRE(device->is_on_device());
    const auto one = host->new_cache(2), other = device->new_cache(2);
    std::int64_t start = 0;
    for (const std::int64_t slots : {5, 5, 1, 120, 7, 5, 90, 2, 100}) { // capacity grows twice on the way
        CAPTURE(start);
        check_equal(step(*host, *one, start, slots), step(*device, *other, start, slots));
        start += slots;
    }
    CHECK(other->capacity() > 256);
    CHECK(other->capacity() == one->capacity());
    check_equal(step(*host, *one, start, 3, true, true), step(*device, *other, start, 3, true, true));
    check_equal(step(*host, *one, start, 3), step(*device, *other, start, 3));
    CHECK(host->traffic().sent == 0);
}

TEST_CASE("ids, lengths and indices cross to the device, predictions come back, and nothing else") {
    const auto backend = opened(as_device);
    const auto cache = backend->new_cache(2);
    step(*backend, *cache, 0, 5);
    const auto numbers = static_cast<std::uint64_t>(backend->outputs().size()); // logits and the likeliest are not asked for
    std::uint64_t floats = 0;
    for (const std::string& name : backend->outputs()) floats += name == "confidence" || name == "margin" || name == "entropy";
    REQUIRE(numbers > floats);
    for (const std::int64_t start : {5, 10, 15}) {
        const mars::OrtTraffic before = backend->traffic();
        step(*backend, *cache, start, 5);
        CHECK(backend->traffic().sent - before.sent == 2 * 5 * 8 + 2 * 8 + 2 * 5 * 8);
        CHECK(backend->traffic().fetched - before.fetched == 2 * 5 * (8 + 4 * floats));
    }
    const mars::OrtTraffic before = backend->traffic();
    const auto saved = cache->save(0, 20);
    cache->load(1, *saved, 20);
    cache->move(0, 1, 20);
    cache->reserve(cache->capacity() + 1);
    CHECK(backend->traffic().sent == before.sent); // moving, saving, loading and growing stay there
    CHECK(backend->traffic().fetched == before.fetched);
}

TEST_CASE("a row that was moved, saved, loaded or brought goes on as if it had stayed") {
    const auto host = opened(std::nullopt), device = opened(as_device);
    for (const auto& backend : {host.get(), device.get()}) {
        const auto first = backend->new_cache(2), second = backend->new_cache(3);
        step(*backend, *first, 0, 20);
        const mars::StepOutput expected = step(*backend, *first, 20, 5);
        const auto saved = first->save(0, 20), whole = first->save(1, 20);
        first->reserve(700); // what was saved is a copy of its own
        second->reserve(300);
        second->load(2, *saved, 20);
        second->move(2, 0, 20);
        second->load(1, *whole, 12); // all but the end, which the next step writes again
        mars::StepInput input{1, 8, 5, {}, {12}, {3, 4, 5, 6, 7}};
        const auto ids = some_ids(25, 1);
        input.input_ids.assign(ids.begin() + 12, ids.begin() + 20);
        mars::StepOutput output;
        backend->step(*second, 1, input, false, output);
        const mars::StepOutput again = step(*backend, *second, 20, 5);
        CHECK(again.token_ids == expected.token_ids);
        CHECK(again.confidence == expected.confidence);
    }
}

TEST_CASE("entries of a file are brought to the device once, and what is saved there can be fetched") {
    const auto device = opened(as_device);
    const auto cache = device->new_cache(1);
    const std::int64_t length = 9;
    const auto entries = std::make_shared<Bytes>(static_cast<std::size_t>(cache->entry_bytes() * length));
    for (std::size_t i = 0; i < entries->size(); i += 2) { // halves of 0x3c.. are small numbers in both types
        (*entries)[i] = static_cast<unsigned char>(i / 2 % 251);
        (*entries)[i + 1] = 0x3c;
    }
    cache->reserve(200);
    const mars::OrtTraffic before = device->traffic();
    const auto brought = cache->bring({entries, entries->data(), length});
    cache->load(0, *brought, length);
    CHECK(device->traffic().sent - before.sent == entries->size());
    auto& rows = dynamic_cast<mars::DeviceRows&>(*cache);
    CHECK(rows.fetch(*cache->save(0, length)) == *entries);
    CHECK(rows.fetch(*brought) == *entries);
}

TEST_CASE("answers are the host's: one token, exact, tau, blocks, batches, a prefix that comes again") {
    const mars::Session host = session_over(std::nullopt, 0), device = session_over(as_device, 64 << 20);
    const auto long_prompt = some_ids(300, 3);
    for (const auto& prompt : {some_ids(3, 5), some_ids(40, 2), long_prompt})
        for (const std::optional<double>& tau : {std::optional<double>(1.0), std::optional<double>(0.3), std::optional<double>()}) {
            const auto config = config_of(tau, 40);
            const auto expected = host.generate(prompt, config).token_ids;
            CHECK(device.generate(prompt, config).token_ids == expected);
            CHECK(device.generate(prompt, config).token_ids == expected); // its prompt is in the store
        }
    CHECK(device.generate(long_prompt, config_of(1.0, 4)).stats.cached_tokens > 0);
    mars::Batcher service(device, {});
    std::vector<mars::Request> requests;
    for (std::int64_t i = 0; i < 12; ++i) requests.push_back(service.submit(some_ids(5 + 9 * i, i), config_of(1.0, 10 + 3 * (i % 4))));
    for (std::int64_t i = 0; i < 12; ++i)
        CHECK(requests[static_cast<std::size_t>(i)].result().token_ids ==
              host.generate(some_ids(5 + 9 * i, i), config_of(1.0, 10 + 3 * (i % 4))).token_ids);
}

TEST_CASE("rows that cannot stay where they should are found by trying, and the log says why") {
    Said said;
    const auto hear = [&](mars::LogLevel, std::string_view words) { said.emplace_back(words); };
    const auto expected = [&] {
        const auto host = opened(std::nullopt);
        const auto cache = host->new_cache(2);
        step(*host, *cache, 0, 5);
        return step(*host, *cache, 5, 5);
    }();
    for (const mars::OrtPlace& place : {mars::OrtPlace{"Cuda", "Cuda", "CudaPinned", 0}, mars::OrtPlace{"Cpu", "Cuda", "Cpu", 0}}) {
        said.clear();
        const auto backend = opened(place, hear);
        CHECK_FALSE(backend->is_on_device());
        REQUIRE(said.size() == 1);
        INFO(said.front());
        CHECK(said.front().find("KV rows cannot stay in " + place.rows + " memory") == 0);
        const auto cache = backend->new_cache(2);
        step(*backend, *cache, 0, 5);
        check_equal(step(*backend, *cache, 5, 5), expected);
    }
    CHECK_FALSE(mars::misplaced({0, 1, 2}, {0, 1, 2}));
    CHECK(mars::misplaced({0, 1, 2}, {0, 0, 0}) == "the graph reads them elsewhere"); // what was copied when it was bound came back
    CHECK(mars::misplaced({0, 0, 0}, {0, 0, 0}) == "the graph writes them elsewhere");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // their own memory is beyond every limit
TEST_CASE("rows that find no memory to grow stay as they were, though the first buffers found some") {
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto backend = opened(std::nullopt);
    const auto cache = backend->new_cache(2), untouched = backend->new_cache(2);
    step(*backend, *cache, 0, 100);
    step(*backend, *untouched, 0, 100);
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    const std::int64_t capacity = (std::int64_t{1} << 28) / cache->entry_bytes(), here = pages * sysconf(_SC_PAGESIZE);
    for (const std::int64_t spare : {100, 200, 300, 400}) { // MiB; all buffers take 512
        const rlimit less{static_cast<rlim_t>(here + (spare << 20)), before.rlim_max};
        REQUIRE(setrlimit(RLIMIT_AS, &less) == 0);
        try {
            cache->reserve(capacity);
            FAIL("there was memory");
        } catch (const mars::MemoryError&) {
        }
        REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
        CHECK(cache->capacity() == 128);
        check_equal(step(*backend, *cache, 100, 5), step(*backend, *untouched, 100, 5));
    }
}
#endif

TEST_CASE("a provider's memory, and the device that an option names") {
    CHECK_FALSE(mars::place_of("CPUExecutionProvider", {}));
    CHECK_FALSE(mars::place_of("TensorrtExecutionProvider", {}));
    const auto first = mars::place_of("CUDAExecutionProvider", {}), third = mars::place_of("CUDAExecutionProvider", {{"device_id", "2"}});
    REQUIRE((first && third));
    CHECK(first->rows == "Cuda");
    CHECK(first->bound == "Cuda");
    CHECK(first->host == "CudaPinned");
    CHECK(first->index == 0);
    CHECK(third->index == 2);
    CHECK(mars::place_of("CUDAExecutionProvider", {{"device_id", "twelve"}})->index == 0); // the provider refuses it in its own words
}

TEST_CASE("operators that carry the work and are left to the CPU are named, those on shapes are not") {
    CHECK_FALSE(mars::heavy_on_cpu({{"Shape", 3}, {"Gather", 2}, {"Squeeze", 2}}, "CUDAExecutionProvider"));
    const auto words = mars::heavy_on_cpu({{"Shape", 3}, {"MatMul", 14}, {"Attention", 2}}, "CUDAExecutionProvider");
    REQUIRE(words);
    CHECK(*words == "CUDAExecutionProvider leaves operators that carry the work to the CPU: 2 Attention, 14 MatMul; every step waits for "
                    "them and for copies");
}

TEST_CASE("which operators a provider left to the CPU is asked of ONNX Runtime, where the headers know the question") {
    const mars::Bundle found = bundle();
    mars::OrtRequest request{found.path / found.manifest.variants.front().file, mars::cpu_provider, {}, 1, 4, nullptr};
    request.options.entries["session.record_ep_graph_assignment_info"] = "1"; // off the CPU it is always asked for
    const auto graph = mars::open_graph(request);
    const auto counts = mars::on_cpu(*graph, "CUDAExecutionProvider"); // which has none of them
    CHECK(counts.has_value() == (ORT_API_VERSION >= 24));
    if (!counts) return;
    CHECK(mars::heavy_on_cpu(*counts, "CUDAExecutionProvider"));
    CHECK(mars::on_cpu(*graph, mars::cpu_provider)->empty());
}

TEST_CASE("the copying graphs copy: bytes, and runs that are cut or filled with zeros") {
    const auto backend = opened(as_device);
    auto cache = backend->new_cache(1);
    cache->reserve(1);
    mars::OrtMemory& memory = dynamic_cast<mars::DeviceRows&>(*cache).memory();
    const auto width = static_cast<std::size_t>(memory.element_bytes());
    Bytes source(6 * width), longer(10 * width, 9), shorter(4 * width, 9), copied(6 * width, 9);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i % 100);
    memory.pad({{source.data(), longer.data()}}, {2, 3}, {2, 5});
    memory.pad({{source.data(), shorter.data()}, {source.data() + width, copied.data()}}, {2, 2}, {2, 2});
    CHECK(std::memcmp(longer.data(), source.data(), 3 * width) == 0);
    CHECK(std::memcmp(longer.data() + 5 * width, source.data() + 3 * width, 3 * width) == 0);
    for (std::size_t i = 3 * width; i < 5 * width; ++i) CHECK(longer[i] == 0);
    CHECK(std::memcmp(shorter.data(), source.data(), 4 * width) == 0);
    CHECK(std::memcmp(copied.data(), source.data() + width, 4 * width) == 0);
    memory.pad({{source.data(), shorter.data()}}, {2, 3}, {2, 2});
    CHECK(std::memcmp(shorter.data() + 2 * width, source.data() + 3 * width, 2 * width) == 0);
    memory.copy({{source.data(), copied.data()}}, source.size());
    CHECK(copied == source);
}
