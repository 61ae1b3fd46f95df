// ONNX Runtime on a GPU that the stub and fake_ort_cuda.hpp play, in both KV layouts: values and answers are the CPU's, and captured
// steps stay right. MARS_BUNDLE is a bundle of this project's (tests/runtime/cpp/test_cpp_ort_device.py makes them).
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "config.hpp"
#include "device/ort/backend.hpp"
#include "device/ort/cuda_backend.hpp"
#include "device/variants.hpp"
#include "fake_ort_cuda.hpp"
#include "named_bundle.hpp"
#include "session/answers.hpp"

namespace {

using Kinds = std::vector<std::string>;

fake_ort::State& played() { return fake_ort::state(); }

/// The graph of a KV layout, of which a GPU in half precision rounds otherwise than the CPU's.
const mars::Variant& graph_of(const mars::Bundle& found, const std::string& layout) {
    const auto& all = found.manifest.variants;
    return *std::find_if(all.begin(), all.end(), [&](const mars::Variant& v) { return v.kv_layout == layout && !v.is_static(); });
}

std::unique_ptr<mars::Backend> on_cpu(const std::string& layout = "cuda") {
    const mars::Bundle found = bundle();
    return std::make_unique<mars::OrtBackend>(found, graph_of(found, layout), "cpu", mars::OrtSettings{1});
}

std::unique_ptr<mars::CudaBackend> on_gpu(const std::string& layout = "cuda", mars::OrtOptions options = {}, mars::OnLog on_log = nullptr) {
    const mars::Bundle found = bundle();
    return std::make_unique<mars::CudaBackend>(found, graph_of(found, layout), "cuda",
                                               mars::OrtSettings{1, std::move(options), std::move(on_log)});
}

mars::Session session_over(std::unique_ptr<mars::Backend> backend, std::int64_t cache_bytes = 0) {
    return mars::Opened::over(bundle(), std::move(backend), std::nullopt, cache_bytes);
}

Kinds kinds() {
    Kinds all;
    for (const auto& run : played().runs) all.push_back(run.first);
    return all;
}

/// A step of `rows` rows over `slots` tokens from entry `start` on.
mars::StepOutput step(mars::Backend& backend, mars::Cache& cache, std::int64_t start, std::int64_t slots, bool want_all = false,
                      std::int64_t first = 0, std::int64_t rows = 2) {
    mars::StepInput input{rows, slots, std::min<std::int64_t>(slots, 7), {}, {}, {}, want_all};
    for (std::int64_t row = 0; row < rows; ++row) {
        const auto ids = some_ids(start + slots, first + row);
        input.input_ids.insert(input.input_ids.end(), ids.begin() + start, ids.end());
        for (std::int64_t i = 0; i < input.outputs; ++i) input.output_index.push_back(slots - input.outputs + i);
        input.kv_length.push_back(start);
    }
    cache.reserve(start + slots, std::vector<std::int64_t>(static_cast<std::size_t>(first + rows), start));
    mars::StepOutput output;
    backend.step(cache, first, input, want_all, output);
    // The first predictions of each row: a GPU's step is padded.
    const auto keep = [&](auto& values, std::int64_t width) {
        if (values.empty()) return;
        std::remove_reference_t<decltype(values)> kept;
        for (std::int64_t row = 0; row < rows; ++row)
            kept.insert(kept.end(), values.begin() + row * output.outputs * width,
                        values.begin() + (row * output.outputs + input.outputs) * width);
        values = kept;
    };
    keep(output.token_ids, 1);
    for (auto* values : {&output.confidence, &output.margin, &output.entropy}) keep(*values, 1);
    keep(output.topk_ids, output.top_k);
    keep(output.topk_logprobs, output.top_k);
    keep(output.logits, output.vocab_size);
    return output;
}

void check_equal(const mars::StepOutput& one, const mars::StepOutput& other) {
    const auto are_close = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) { return std::abs(x - y) < 0.05F; });
    };
    CHECK(one.token_ids == other.token_ids);
    CHECK(are_close(one.confidence, other.confidence));
    CHECK(are_close(one.margin, other.margin));
    CHECK(are_close(one.entropy, other.entropy));
    CHECK(are_close(one.logits, other.logits));
    CHECK(one.topk_ids == other.topk_ids);
    CHECK(are_close(one.topk_logprobs, other.topk_logprobs));
    CHECK(one.top_k == other.top_k);
}

bool is_half() { return bundle().manifest.variants.front().kv_dtype == "float16"; }

} // namespace

TEST_CASE("a released row is zero, beside rows that are not") {
    const auto backend = on_cpu();
    const auto cache = backend->new_cache(3);
    auto& rows = dynamic_cast<mars::OrtRows&>(*cache);
    for (const std::int64_t capacity : {1, 3000}) { // rows without and with whole pages
        cache->reserve(capacity, {});
        const auto size = static_cast<std::ptrdiff_t>(rows.row_bytes());
        std::fill_n(rows.at(0, 0), 3 * size, 7);
        cache->release(1);
        CHECK(std::count(rows.at(0, 0), rows.at(0, 3), 7) == 2 * size);
        CHECK(std::count(rows.at(0, 1), rows.at(0, 2), 0) == size);
    }
}

TEST_CASE("steps on a GPU give the host's values: wider steps, more entries, other outputs; a row that grows is captured again") {
    for (const char* layout : {"in-place", "cuda"}) {
        CAPTURE(layout);
        fake_ort::pretend();
        const auto host = on_cpu(layout);
        const auto device = on_gpu(layout);
        const auto one = host->new_cache(2), other = device->new_cache(2);
        std::int64_t start = 0;
        for (const std::int64_t slots : {5, 5, 1, 120, 7, 5, 90, 190, 2, 60, 7, 7, 3}) {
            CAPTURE(start);
            check_equal(step(*host, *one, start, slots), step(*device, *other, start, slots));
            start += slots;
        }
        CHECK(other->capacity() == 1024);
        check_equal(step(*host, *one, start, 3, true), step(*device, *other, start, 3, true));
        check_equal(step(*host, *one, start, 3), step(*device, *other, start, 3));
        CHECK(played().count("capture") == (std::string(layout) == "cuda" ? 2 : 0)); // before and after it grew
        CHECK((played().count("replay") > 2) == (std::string(layout) == "cuda"));
        other->shrink(start, {start, start});
        CHECK(other->capacity() == 1024);
    }
}

TEST_CASE("a row continues unchanged after it was moved, saved or loaded") {
    for (const char* layout : {"in-place", "cuda"}) {
        CAPTURE(layout);
        fake_ort::pretend();
        const auto backend = on_gpu(layout);
        const auto first = backend->new_cache(2), second = backend->new_cache(3);
        step(*backend, *first, 0, 20);
        const mars::StepOutput expected = step(*backend, *first, 20, 5);
        const auto saved = first->save(0, 20), whole = first->save(1, 20);
        first->reserve(700); // what was saved is a copy of its own
        second->reserve(300);
        second->load(2, *saved, 20);
        second->move(2, 0, 20);
        second->load(1, *whole, 20);
        check_equal(step(*backend, *second, 20, 5), expected);
    }
}

TEST_CASE("answers equal the host's: one token, exact, tau, blocks, batches, a repeated prefix") {
    for (const char* layout : {"in-place", "cuda"}) {
        CAPTURE(layout);
        fake_ort::pretend();
        auto backend = on_gpu(layout);
        const std::int64_t width = backend->decode_slots();
        const mars::Session host = session_over(on_cpu(layout)), device = session_over(std::move(backend), 64 << 20);
        int same = 0, all = 0;
        const auto compare = [&](const auto& one, const auto& other) { same += one == other, ++all; };
        const auto long_prompt = some_ids(300, 3);
        for (const auto& prompt : {some_ids(3, 5), some_ids(40, 2), long_prompt})
            for (const std::optional<double>& tau : {std::optional<double>(1.0), std::optional<double>(0.3), std::optional<double>()}) {
                const auto config = config_of(tau, 40);
                const auto expected = host.generate(prompt, config).token_ids;
                compare(device.generate(prompt, config).token_ids, expected);
                compare(device.generate(prompt, config).token_ids, expected); // its prompt is in the store
            }
        CHECK(device.generate(long_prompt, config_of(1.0, 4)).stats.cached_tokens > 0);
        mars::Batcher service(device, {});
        std::vector<mars::Request> requests;
        for (std::int64_t i = 0; i < 12; ++i) requests.push_back(service.submit(some_ids(5 + 9 * i, i), config_of(1.0, 10 + 3 * (i % 4))));
        for (std::int64_t i = 0; i < 12; ++i)
            compare(requests[static_cast<std::size_t>(i)].result().token_ids,
                    host.generate(some_ids(5 + 9 * i, i), config_of(1.0, 10 + 3 * (i % 4))).token_ids);
        CHECK(same >= (is_half() ? all * 8 / 10 : all)); // in half precision, steps of other sizes round otherwise
        CHECK((played().count("replay") > 2 * played().count("capture")) == (std::string(layout) == "cuda"));
        for (const auto& [how, slots] : played().runs) CHECK((how == "eager" || slots == width));
    }
}

TEST_CASE("requests one after the other replay what the first captured, and nothing grows") {
    fake_ort::pretend();
    auto backend = on_gpu();
    const mars::CudaBackend& watched = *backend;
    const mars::Session session = session_over(std::move(backend));
    const auto config = config_of(1.0, 12);
    const auto expected = session.generate(some_ids(3, 1), config).token_ids;
    for (int i = 0; i < 3; ++i) session.generate(some_ids(3, 1), config);
    const std::size_t blocks = stub::state().memory.size(), graphs = watched.num_graphs();
    played().runs.clear();
    for (int i = 0; i < 50; ++i) CHECK(session.generate(some_ids(3, 1), config).token_ids == expected);
    CHECK(played().count("replay") == static_cast<std::int64_t>(played().runs.size()));
    CHECK(stub::state().memory.size() == blocks);
    CHECK(watched.num_graphs() == graphs);
}

TEST_CASE("the first run is eager, the second is captured, later ones are replayed; another thread captures its own") {
    fake_ort::pretend();
    const auto backend = on_gpu();
    const auto cache = backend->new_cache(2);
    std::vector<bool> prepared;
    mars::StepOutput expected;
    for (std::int64_t i = 0; i < 4; ++i) {
        expected = step(*backend, *cache, 0, 5);
        prepared.push_back(expected.is_prepared);
    }
    CHECK(kinds() == Kinds{"eager", "eager", "capture", "replay", "replay"});
    CHECK(prepared == std::vector<bool>{false, false, true, true});
    played().runs.clear();
    mars::StepOutput output;
    std::thread([&] {
        for (int i = 0; i < 3; ++i) output = step(*backend, *cache, 0, 5);
    }).join();
    check_equal(output, expected);
    CHECK(kinds() == Kinds{"eager", "eager", "capture", "replay"});
    played().runs.clear();
    for (int i = 0; i < 2; ++i) CHECK(step(*backend, *cache, 5, 40).is_prepared == (i > 0)); // a prompt
    CHECK(kinds() == Kinds{"eager", "eager"});
}

TEST_CASE("few shapes are captured, because none can be released; the others run as they are") {
    fake_ort::pretend();
    const auto host = on_cpu();
    const auto device = on_gpu();
    const auto one = host->new_cache(14), other = device->new_cache(14);
    one->reserve(64), other->reserve(64);
    for (int round = 0; round < 2; ++round)
        for (std::int64_t first = 0; first < 14; ++first)
            for (std::int64_t rows = 1; first + rows <= 14; ++rows) { // 105 shapes
                const auto expected = step(*host, *one, 0, 3, false, first, rows);
                for (int i = 0; i < 2; ++i) REQUIRE(step(*device, *other, 0, 3, false, first, rows).token_ids == expected.token_ids);
            }
    CHECK(device->num_graphs() == 64);
    CHECK(played().captured.size() == 64);
}

TEST_CASE("a failed step leaves nothing bound, and rows stay unchanged if memory runs out while they grow") {
    fake_ort::pretend();
    const auto backend = on_gpu();
    const auto cache = backend->new_cache(2), untouched = backend->new_cache(2);
    for (const auto& each : {cache.get(), untouched.get()}) step(*backend, *each, 0, 100);
    for (int i = 0; i < 3; ++i) step(*backend, *cache, 100, 5);
    played().fails = true;
    CHECK_THROWS_WITH_AS(step(*backend, *cache, 100, 5), doctest::Contains("a step of 2 x 5 slots: Failed to allocate"), mars::MemoryError);
    played().fails = false;
    played().runs.clear();
    check_equal(step(*backend, *cache, 100, 5), step(*backend, *untouched, 100, 5));
    CHECK(kinds() == Kinds{"eager", "eager"});
    stub::state().has_no_memory = true;
    CHECK_THROWS_WITH_AS(cache->reserve(600, {105, 105}), doctest::Contains("out of memory"), mars::MemoryError);
    CHECK(cache->capacity() == 512);
    stub::state().has_no_memory = false;
    check_equal(step(*backend, *cache, 105, 5), step(*backend, *untouched, 105, 5));
    stub::state().is_broken = true;
    CHECK_THROWS_AS(step(*backend, *cache, 110, 5), mars::DeviceLost);
}

TEST_CASE("capturing can be turned off, and a graph that cannot be captured runs and says so") {
    fake_ort::pretend();
    const auto turned_off = on_gpu("cuda", {{"enable_cuda_graph", "0"}});
    const auto expected = step(*turned_off, *turned_off->new_cache(2), 0, 5);
    played().refuses_capture = true;
    std::string heard;
    const auto refused = on_gpu("cuda", {}, [&](mars::LogLevel level, std::string_view words) {
        if (level == mars::LogLevel::warning) heard = words;
    });
    CHECK(heard.find("cannot use the graph capture feature") != std::string::npos);
    CHECK(heard.find("steps are not captured as CUDA graphs, and are slower") != std::string::npos);
    const auto cache = refused->new_cache(2);
    for (const bool is_prepared : {false, true, true}) {
        const auto output = step(*refused, *cache, 0, 5);
        check_equal(output, expected);
        CHECK(output.is_prepared == is_prepared);
    }
    CHECK(kinds() == Kinds(4, "eager"));
}

TEST_CASE("caches may outlive their backend; memory and the stream go with the last") {
    fake_ort::pretend();
    auto backend = on_gpu();
    const std::int64_t free = std::int64_t{8} << 30;
    CHECK(*backend->free_memory() == free);
    auto cache = backend->new_cache(2);
    for (int i = 0; i < 3; ++i) step(*backend, *cache, 0, 5);
    CHECK(*backend->free_memory() < free);
    backend.reset();
    cache->move(0, 1, 2);
    cache.reset();
    CHECK(stub::state().memory.empty());
    CHECK(stub::state().locked.empty());
    CHECK(stub::state().streams == 0);
}

TEST_CASE("a session on a GPU: the graph for CUDA comes first, the provider's defaults, its number, and the caller's stream") {
    fake_ort::pretend();
    const mars::Bundle found = bundle();
    CHECK(mars::choose(found, "cuda").kv_layout == "cuda");
    CHECK(mars::choose(found, "cpu").kv_layout == "in-place");
    mars::Session::Options options;
    options.device = "cuda:1";
    options.options = {{"use_tf32", "1"}};
    stub::state().gpu = 1;
    cudaStream_t stream = nullptr;
    stub::current() = 1;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    stub::current() = 0;
    options.cuda_stream = stream;
    {
        const mars::Session session = mars::Session::open(found.path, options);
        CHECK(session.generate(some_ids(3, 1), config_of(1.0, 4)).token_ids.size() == 4);
    }
    CHECK(played().stream == stream);
    CHECK(stub::state().streams == 1); // the caller's
    CHECK(stub::state().memory.empty());
    const std::map<std::string, std::string> expected{{"arena_extend_strategy", "kSameAsRequested"},
                                                      {"device_id", "1"},
                                                      {"enable_cuda_graph", "1"},
                                                      {"enable_skip_layer_norm_strict_mode", "1"},
                                                      {"use_tf32", "1"}};
    CHECK(played().options == expected);
    for (const char* version : {"1.27.0", "1.31.1", "2.0.0"}) mars::check_cuda_version(version);
    for (const char* version : {"1.26.9", "1.25.1", "1.9.0", "0.99", "x"})
        CHECK_THROWS_WITH_AS(mars::check_cuda_version(version), doctest::Contains("install onnxruntime-gpu 1.27 or newer"),
                             mars::SessionError);
}

TEST_CASE("a step whose sequences are over ends in ONNX Runtime on the CPU") {
    const auto backend = on_cpu();
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
