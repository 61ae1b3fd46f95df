// KV rows of ONNX Runtime in a device's memory, tried with memory that counts what is done there. MARS_BUNDLE is a bundle of this project's
// (tests/runtime/cpp/test_cpp_ort_device.py makes them).
#include <algorithm>
#include <dlfcn.h>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "device/ort/backend.hpp"
#include "device/ort/memory.hpp"
#include "device/ort/open.hpp"
#include "named_bundle.hpp"
#include "session/answers.hpp"

namespace {

using Said = std::vector<std::string>;

/// The host's memory as if it were a device's, of which a test says how much is free.
class Counted : public mars::RowMemory {
  public:
    const char* name() const override { return "Cpu"; }
    unsigned char* allocate(std::size_t num_bytes) override {
        if (blocks == most_blocks) throw std::bad_alloc();
        ++blocks;
        return host->allocate(num_bytes);
    }
    void release(unsigned char* address) noexcept override {
        --blocks;
        host->release(address);
    }
    void copy(const mars::RowRuns& target, const mars::RowRuns& source, std::int64_t width, std::int64_t count) override {
        ++copies;
        host->copy(target, source, width, count);
    }
    std::optional<std::int64_t> available() const override { return free; }

    std::optional<std::int64_t> free;
    std::atomic<int> blocks{0}, copies{0};
    int most_blocks = -1;

  private:
    const std::shared_ptr<mars::RowMemory> host = mars::host_memory();
};

std::unique_ptr<mars::OrtBackend> opened(std::shared_ptr<mars::RowMemory> memory = nullptr) {
    const mars::Bundle found = bundle();
    return std::make_unique<mars::OrtBackend>(found, found.manifest.variants.front(), "cpu", mars::OrtSettings{1}, std::move(memory));
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
    cache.reserve(start + slots, {start, start});
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

mars::Session session_over(std::shared_ptr<mars::RowMemory> memory, std::int64_t cache_bytes) {
    return mars::Opened::over(bundle(), opened(std::move(memory)), std::nullopt, cache_bytes);
}

} // namespace

TEST_CASE("rows on a device give the same values as rows on the host: wider steps, more entries, other outputs") {
    const auto memory = std::make_shared<Counted>();
    const auto host = opened(), device = opened(memory);
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
    CHECK(memory->blocks > 0);
}

TEST_CASE("a row continues unchanged after it was moved, saved or loaded") {
    const auto memory = std::make_shared<Counted>();
    const auto host = opened(), device = opened(memory);
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
    CHECK(memory->copies > 0);
    CHECK(memory->blocks == 0); // all was released
}

TEST_CASE("answers equal the host's: one token, exact, tau, blocks, batches, a repeated prefix") {
    const mars::Session host = session_over(nullptr, 0), device = session_over(std::make_shared<Counted>(), 64 << 20);
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

TEST_CASE("rows stay unchanged if memory runs out while they grow") {
    const auto memory = std::make_shared<Counted>();
    const auto backend = opened(memory);
    const auto cache = backend->new_cache(2), untouched = backend->new_cache(2);
    step(*backend, *cache, 0, 100);
    step(*backend, *untouched, 0, 100);
    for (const int spare : {0, 1, 3}) {
        memory->most_blocks = memory->blocks + spare;
        CHECK_THROWS_AS(cache->reserve(500), mars::MemoryError);
        CHECK(cache->capacity() == 128);
    }
    memory->most_blocks = -1;
    const std::int64_t large = (std::int64_t{1} << 28) / cache->entry_bytes();
    memory->free = 100'000'000; // asked before anything is taken
    const int blocks = memory->blocks;
    CHECK_THROWS_WITH_AS(cache->reserve(large), doctest::Contains("100 MB are free; shorten the prompt"), mars::MemoryError);
    CHECK(memory->blocks == blocks);
    check_equal(step(*backend, *cache, 100, 5), step(*backend, *untouched, 100, 5));
}

TEST_CASE("a step whose sequences are over ends in ONNX Runtime") {
    const auto backend = opened();
    const auto cache = backend->new_cache(1);
    cache->reserve(128);
    mars::StepInput input{1, 8, 1, some_ids(8, 1), {0}, {7}};
    input.interrupt = std::make_shared<mars::Interrupt>(1);
    mars::StepOutput output;
    backend->step(*cache, 0, input, false, output); // with an interrupt that does not come
    input.interrupt->drop();
    CHECK_THROWS_AS(backend->step(*cache, 0, input, false, output), mars::Interrupted);
    input.interrupt = nullptr;
    backend->step(*cache, 0, input, false, output);
}

TEST_CASE("the default size of the prefix cache depends on the device's free memory") {
    const auto memory = std::make_shared<Counted>();
    memory->free = 1600;
    CHECK(opened(memory)->free_memory() == 1600);
}

TEST_CASE("a GPU's free memory is read from the loaded CUDA runtime") {
    CHECK_THROWS_WITH_AS(mars::cuda_memory(1), doctest::Contains("has loaded no libcudart.so.13"), mars::SessionError);
    void* library = dlopen(CUDART_STUB, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    const auto state = [&](const char* name) -> int& { return *static_cast<int*>(dlsym(library, name)); };
    const auto memory = mars::cuda_memory(1);
    unsigned char *one = memory->allocate(12), *other = memory->allocate(6);
    CHECK(std::count(one, one + 12, 0) == 12);
    std::iota(one, one + 12, static_cast<unsigned char>(0));
    memory->copy({other, 2}, {one, 4}, 2, 3);
    CHECK(std::vector<int>(other, other + 6) == std::vector<int>{0, 1, 4, 5, 8, 9});
    CHECK(memory->available() == 1000);
    CHECK(state("stub_device") == 2); // as it was
    state("stub_error") = 1;
    CHECK_THROWS_AS(memory->copy({other, 2}, {one, 4}, 2, 3), mars::DeviceError);
    state("stub_error") = 700;
    CHECK_THROWS_AS(memory->copy({other, 2}, {one, 4}, 2, 3), mars::DeviceLost);
    memory->release(one);
    memory->release(other);
    state("stub_integrated") = 1;
    CHECK(*mars::cuda_memory(1)->available() > 1000); // the system's
}

TEST_CASE("TF32 is off on CUDA unless it is requested, and old providers are refused") {
    CHECK(mars::provider_options(mars::cuda_provider, {}).at("use_tf32") == "0");
    CHECK(mars::provider_options(mars::cuda_provider, {{"use_tf32", "1"}}).at("use_tf32") == "1");
    CHECK(mars::provider_options("OpenVINOExecutionProvider", {}).empty());
    for (const char* version : {"1.27.0", "1.31.1", "2.0.0"}) mars::check_cuda_version(version);
    for (const char* version : {"1.26.9", "1.25.1", "1.9.0", "0.99", "x"})
        CHECK_THROWS_WITH_AS(mars::check_cuda_version(version), doctest::Contains("install onnxruntime-gpu 1.27 or newer"),
                             mars::SessionError);
}
