// The TensorRT backend over a stub of TensorRT and CUDA: addresses, shapes, ranges, cursors, captured steps, the order on the stream.
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>

#include <mars/batcher.hpp>
#include <mars/errors.hpp>
#include <mars/session.hpp>

#include "answers.hpp"
#include "decode/blocks.hpp"
#include "decode/guide.hpp"
#include "decode/prefix.hpp"
#include "decode/schedule.hpp"
#include "device/here.hpp"
#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/trt.hpp"
#include "device/variants.hpp"
#include "engine_manifest.hpp"
#include "scripted.hpp"
#include "trt_stub/stub.hpp"

extern "C" const mars::EnginePlugin* mars_engine_plugin();

namespace {

using Tokens = fake::Tokens;

const std::vector<Tokens> prompts{{5, 6, 7}, {9}, {11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30}};

/// A bundle's directory beside the others of this run, with one stub engine in it.
struct Made {
    explicit Made(const EngineShape& shape = {}, const std::string& engine = "")
        : bundle{std::filesystem::temp_directory_path() / ("mars-trt-" + std::to_string(getpid())) / "a.bundle",
                 mars::parse_manifest(engine_manifest(shape, mars::tensorrt_flavor()).dump())} {
        stub::reset();
        std::filesystem::create_directories(bundle.path);
        std::ofstream(bundle.path / "rtx.engine") << (engine.empty() ? stub_engine(shape) : engine);
    }
    ~Made() { std::filesystem::remove_all(bundle.path.parent_path()); }
    Made(const Made&) = delete;
    Made& operator=(const Made&) = delete;

    mars::TrtBackend open() const { return {bundle, bundle.manifest.variants.front()}; }

    mars::Bundle bundle;
};

std::vector<Tokens> answers(mars::Backend& backend, const std::vector<Tokens>& asked, bool blocks, std::int64_t most = 20,
                            std::int64_t cache_block = 4, mars::Prefixes* store = nullptr) {
    std::vector<std::unique_ptr<mars::Row>> rows;
    std::vector<mars::Row*> pointers;
    for (const Tokens& prompt : asked) {
        mars::GenerationConfig config;
        config.tau = 0.5;
        config.max_new_tokens = most--;
        rows.push_back(std::make_unique<mars::Row>(static_cast<std::int64_t>(rows.size()), prompt, config, Tokens{}));
        if (store != nullptr) rows.back()->stem = store->stem();
        pointers.push_back(rows.back().get());
    }
    const auto loop =
        blocks ? mars::decode_blocks(backend, pointers, 4, fake::mask, cache_block) : mars::decode(backend, pointers, 4, fake::mask);
    while (loop->next()) {
    }
    std::vector<Tokens> all;
    for (const auto& row : rows) all.push_back(row->tokens);
    return all;
}

mars::StepInput input(std::int64_t rows, std::int64_t slots, std::int64_t token = 3) {
    const auto count = static_cast<std::size_t>(rows);
    return {rows, slots, 1, Tokens(count * static_cast<std::size_t>(slots), token), Tokens(count, 0), Tokens(count, 0)};
}

const float* kv(mars::TrtCache& cache, std::size_t tensor) { return reinterpret_cast<const float*>(cache.memory().addresses[tensor]); }

const mars::KvMemory& memory(mars::Cache& cache) { return dynamic_cast<mars::TrtCache&>(cache).memory(); }

std::string refused(const std::function<void()>& call) {
    try {
        call();
    } catch (const mars::SessionError& error) {
        return error.what();
    }
    return "nothing was refused";
}

} // namespace

TEST_CASE("the loops accept what they accept elsewhere, with captured steps and without") {
    for (const char* layout : {"static", "delta"})
        for (const bool fixed : {false, true})
            for (const stub::Refuses refuses :
                 {stub::Refuses::nothing, stub::Refuses::begin, stub::Refuses::end, stub::Refuses::instantiate})
                for (const bool blocks : {false, true}) {
                    CAPTURE(layout);
                    CAPTURE(fixed);
                    CAPTURE(static_cast<int>(refuses));
                    CAPTURE(blocks);
                    EngineShape shape;
                    shape.fixed = fixed;
                    shape.kv_layout = layout;
                    const Made made(shape);
                    stub::state().refuses = refuses;
                    mars::TrtBackend backend = made.open();
                    fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
                    const auto expected = answers(reference, prompts, blocks);
                    // The second time on memory that was used, the third with captured steps.
                    for (int i = 0; i < 3; ++i) CHECK(answers(backend, prompts, blocks) == expected);
                    CHECK((stub::state().launches > 0) == (refuses == stub::Refuses::nothing));
                    CHECK(stub::state().captures == 0); // each captured graph was destroyed
                    CHECK(backend.num_graphs() == static_cast<std::size_t>(stub::state().graphs));
                }
}

TEST_CASE("an engine's top-k outputs are fetched where a step wants them, of any size, and nowhere else") {
    for (const bool fixed : {false, true}) {
        EngineShape shape;
        shape.top_k = 5;
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        for (int i = 0; i < 3; ++i) CHECK(answers(backend, prompts, false) == answers(reference, prompts, false));
        stub::state().wide = [](std::int64_t at, std::int64_t first) { return Tokens{first, 100 * at, 100 * at + 1, 100 * at + 2, 7}; };
        const auto cache = backend.new_cache(2);
        mars::StepOutput output;
        const auto fetched = [&](mars::StepInput asked, bool want_topk) {
            stub::state().events.clear();
            asked.want_topk = want_topk;
            backend.step(*cache, 0, asked, false, output);
            std::size_t size = 0;
            for (const auto& [kind, num_bytes] : stub::state().events) size += kind == "download" ? num_bytes : 0;
            return size;
        };
        const mars::StepInput asked{2,      3,           2, {3, 4, 5, 6, 7, 8},
                                    {0, 0}, {0, 2, 1, 2}}; // filled up to 4 slots, and 4 outputs if it is fixed
        for (int i = 0; i < 3; ++i) {
            CHECK(fetched(asked, true) == 2 * 256 + 512 + 256); // 3 x 4 predictions of 5 ids and log-probabilities at most
            CHECK(output.top_k == 5);
            REQUIRE(output.token_ids.size() == 4);
            REQUIRE(output.topk_ids.size() == 4 * 5);
            for (std::size_t at = 0; at < 4; ++at) {
                const std::int64_t position = asked.output_index[at] + 1;
                const Tokens own(output.topk_ids.begin() + static_cast<std::ptrdiff_t>(5 * at),
                                 output.topk_ids.begin() + static_cast<std::ptrdiff_t>(5 * at + 5));
                CHECK(own == Tokens{output.token_ids[at], 100 * position, 100 * position + 1, 100 * position + 2, 7});
                CHECK(output.topk_logprobs[5 * at + 4] == -4.0F);
            }
            CHECK(fetched(asked, false) == 2 * 256);
            CHECK(output.top_k == 0);
            CHECK(output.topk_ids.empty());
            CHECK(output.topk_logprobs.empty());
        }
    }
}

TEST_CASE("under a grammar an engine gives what a graph gives") {
    int num_choices = 0;
    for (const auto& wanted : scripted::kept().json["answers"]) {
        if (wanted["logits"] || wanted["top_k"] == 0) continue;
        CAPTURE(wanted["name"].get<std::string>());
        EngineShape shape;
        shape.block = wanted["block"];
        shape.outputs = 2 * shape.block - 1;
        shape.capacity = shape.context = 1024;
        shape.prefill = 128;
        shape.top_k = wanted["top_k"];
        const Made made(shape);
        mars::TrtBackend engine = made.open();
        auto same = wanted;
        same["max_slots"] = *engine.max_slots();
        same["max_outputs"] = *engine.max_outputs();
        scripted::Model graph(wanted["script"].get<Tokens>(), same);
        stub::state().predict = [&](const Tokens& known, std::int64_t masks) { return graph.wanted(known, masks); };
        stub::state().wide = [&](std::int64_t at, std::int64_t first) { return graph.likeliest(at, first, shape.top_k); };
        const auto answer = [&](mars::Backend& backend) {
            mars::Row row(0, scripted::kept().prompt, scripted::config_of(wanted), {scripted::kept().end});
            row.guide = std::make_unique<mars::Guide>(scripted::kept().walk(wanted["grammar"])->matcher(), Tokens{scripted::kept().end},
                                                      false, shape.block - 1);
            std::string end = refused([&] {
                const auto loop = mars::decode(backend, {&row}, shape.block, fake::mask);
                while (loop->next()) {
                }
            });
            if (row.finish_reason) end += mars::to_string(*row.finish_reason);
            const mars::Stats& stats = row.stats;
            return std::tuple(row.tokens, end, Tokens{stats.forwards, stats.forced, stats.proposed, stats.verified});
        };
        const auto expected = answer(graph);
        for (int i = 0; i < 3; ++i) { // the second time with captured steps
            const auto found = answer(engine);
            CHECK(std::get<0>(found) == std::get<0>(expected));
            CHECK(std::get<1>(found) == std::get<1>(expected));
            CHECK(std::get<2>(found) == std::get<2>(expected));
        }
        num_choices += std::get<0>(expected).size() > scripted::kept().prompt.size() ? 1 : 0;
    }
    CHECK(num_choices > 5);
}

TEST_CASE("only ids and confidences come back, in the stream's order") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(3);
    mars::StepOutput output;
    for (int i = 0; i < 3; ++i) {
        stub::state().events.clear();
        stub::state().waits = 0;
        backend.step(*cache, 0, input(3, 4), false, output);
        std::vector<std::string> kinds;
        std::size_t fetched = 0;
        for (const auto& [kind, size] : stub::state().events) {
            kinds.push_back(kind);
            fetched += kind == "download" ? size : 0;
        }
        CHECK(kinds == std::vector<std::string>{"upload", "execute", "download"}); // one copy each way
        CHECK(fetched == 2 * 256);                                                 // each from where a tensor may begin
        CHECK(stub::state().waits == 1);
        CHECK(output.token_ids.size() == 3);
        CHECK(output.confidence[0] == fake::hashed({3}, 0).second);
    }
    CHECK(stub::state().launches == 2); // the first run prepares, the second is captured and replayed
}

TEST_CASE("memory is allocated once, and goes with the backend") {
    const Made made;
    {
        mars::TrtBackend backend = made.open();
        answers(backend, prompts, false);
        const std::size_t before = stub::state().allocations.size();
        for (int i = 0; i < 20; ++i) answers(backend, {prompts[0], prompts[1]}, false, 6);
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

TEST_CASE("memory that is used again holds no old entries") {
    const Made made;
    mars::TrtBackend backend = made.open();
    auto cache = backend.new_cache(1);
    const auto addresses = memory(*cache).addresses;
    for (const mars::Address address : addresses)
        std::fill_n(reinterpret_cast<float*>(address), 2 * 64 * 4, std::numeric_limits<float>::infinity());
    cache.reset();
    cache = backend.new_cache(1);
    CHECK(memory(*cache).addresses == addresses);
    mars::StepOutput output;
    backend.step(*cache, 0, input(1, 1), false, output); // clears are on the stream
    const float* entries = reinterpret_cast<const float*>(addresses[0]);
    CHECK(std::count(entries, entries + 2 * 64 * 4, 0.0F) == 2 * 64 * 4 - 2 * 4);
}

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
    backend.step(*cache, 0, input(1, 1), false, output);
    backend.step(*cache, 0, input(3, 7), false, output);
    CHECK(ranges() == Tokens{0, 0}); // decode, a context for each shape
    backend.step(*cache, 0, input(1, 8), false, output);
    backend.step(*cache, 0, input(2, 16), false, output);
    backend.step(*cache, 2, input(1, 16), false, output);
    CHECK(ranges() == Tokens{0, 0, 1}); // prefill, one context for all
    const stub::Bound& last = *stub::state().contexts.back();
    CHECK(last.shapes.at("input_ids") == stub::Shape{1, 16});
    CHECK(last.shapes.at("past_key_values.1.value") == stub::Shape{1, 2, 64, 4});
    const auto& lent = memory(*cache);
    CHECK(reinterpret_cast<mars::Address>(last.addresses.at("past_key_values.0.key")) == lent.addresses[0] + 2 * lent.row_bytes);
    CHECK(refused([&] { backend.step(*cache, 0, input(1, 17), false, output); }) ==
          "a step of 1 x 17 slots with 1 predictions is beyond this engine (decode: 1-3 x 1-7; prefill: 1-3 x 1-16; at most 4 "
          "predictions); build one with a larger --batch, --prefill or --block");
}

TEST_CASE("requests of a batcher are rows of one batch of the engine, and get what each gets alone") {
    const Made made;
    std::vector<Tokens> wanted;
    {
        auto backend = made.open();
        for (const Tokens& prompt : prompts) wanted.push_back(answers(backend, {prompt}, false).front());
    }
    const mars::Session session =
        mars::Opened::over(made.bundle, std::make_unique<mars::TrtBackend>(made.bundle, made.bundle.manifest.variants.front()));
    session.set_cost({{1, 1e-4}, {64, 3e-4}});
    mars::Limits limits;
    limits.max_rows = 4;
    CHECK(refused([&] { mars::Batcher(session, limits); }).find("4 rows, but this engine was built for at most 3") == 0);
    limits.max_rows = 3;
    std::promise<void> gate; // the first step waits until all requests are there
    const auto opened = gate.get_future().share();
    stub::state().predict = [opened](const Tokens& tokens, std::int64_t position) {
        opened.wait();
        return fake::hashed(tokens, position);
    };
    mars::Batcher batcher(session, limits);
    std::vector<mars::Request> requests;
    for (int round = 0; round < 4; ++round)
        for (const Tokens& prompt : prompts) {
            mars::GenerationConfig config;
            config.tau = 0.5;
            config.max_new_tokens = 20;
            config.window = mars::full_window;
            config.eos_ids.emplace();
            requests.push_back(batcher.submit(prompt, config));
        }
    gate.set_value();
    for (std::size_t i = 0; i < requests.size(); ++i) {
        Tokens all = prompts[i % prompts.size()];
        for (const std::int64_t token : requests[i].result(60.0).token_ids) all.push_back(token);
        CHECK(all == wanted[i % prompts.size()]);
    }
    CHECK(batcher.close());
    CHECK(batcher.counts().finished == 12);
    std::int64_t widest = 0;
    for (const stub::Bound* bound : stub::state().contexts)
        if (bound != nullptr && bound->shapes.count("input_ids") > 0) widest = std::max(widest, bound->shapes.at("input_ids").front());
    CHECK(widest == 3);
}

TEST_CASE("a captured step belongs to its rows and memory, and the oldest is forgotten") {
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
    CHECK(backend.num_graphs() <= 64);
    CHECK(stub::state().forgotten >= 4);
}

TEST_CASE("steps are filled up to few sizes") {
    for (const char* layout : {"static", "delta"}) {
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
            if (context->range == 0) sizes.insert(context->shapes.at("input_ids")[1]);
        CHECK(sizes == std::set<std::int64_t>{1, 2, 4, 7}); // 2 at the end of the row, where there is no room for filling
        CHECK(backend.num_graphs() <= 10);
    }
}

TEST_CASE("pieces of a prompt are filled up to powers of two") {
    EngineShape shape;
    shape.prefill = 100;
    const auto manifest = mars::parse_manifest(engine_manifest(shape).dump());
    const mars::Filling filling(*manifest.variants.front().engine, 200, false);
    const auto slots = [&](std::int64_t asked, std::int64_t length) {
        mars::StepInput window = input(1, asked);
        window.kv_length = {length};
        const auto filled = filling.filled(window);
        return filled ? filled->slots : asked;
    };
    std::vector<std::int64_t> made;
    for (const std::int64_t asked : {8, 16, 17, 33, 64, 65, 99, 100}) made.push_back(slots(asked, 0));
    CHECK(made == std::vector<std::int64_t>{16, 16, 32, 64, 64, 100, 100, 100});
    CHECK(slots(20, 170) == 20); // 32 slots would write beyond the row
}

TEST_CASE("idle memory makes room, and no step stays bound to it") {
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

    // Memory that cannot be had is said with the figure, nothing is lost, and what lies idle goes first.
    stub::state().has_no_memory = true;
    const std::size_t before = stub::state().memory.size();
    const auto more = backend.new_cache(1);
    CHECK(refused([&] { more->reserve(1); }) ==
          "not enough memory: the KV entries of 1 row(s) of 64 take 0 MB (CUDA: cudaMalloc failed: out of memory "
          "(cudaErrorMemoryAllocation)); shorten the prompt or max_new_tokens, run fewer rows at once, or free memory");
    CHECK(stub::state().memory.size() == before);
}

TEST_CASE("rows that are not aligned are refused before TensorRT is asked") {
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
    auto& moved = dynamic_cast<mars::TrtCache&>(*cache);
    for (const std::size_t head : {0U, 1U}) {
        const float* entries = kv(moved, 3) + head * 64 * 4;
        CHECK(entries[0] == 8);
        CHECK(entries[7] == 9);
        CHECK(std::count(entries + 8, entries + 64 * 4, 0.0F) == 62 * 4);
    }
    CHECK(std::count(kv(moved, 3) + 2 * 64 * 4, kv(moved, 3) + 4 * 64 * 4, 0.0F) == 2 * 64 * 4);
}

TEST_CASE("copies between rows are one call each, and new entries are placed by one a row") {
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
        shape.kv_layout = "delta";
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(3);
        auto& rows = dynamic_cast<mars::TrtCache&>(*cache);
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

TEST_CASE("whose GPU is current in a thread does not matter, and it is left as it was") {
    EngineShape shape;
    shape.kv_layout = "delta";
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

TEST_CASE("a GPU is named by its number, and everything is its own") {
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
        const auto backend = mars_engine_plugin()->open(made.bundle, made.bundle.manifest.variants.front(), 1);
        fake::Backend reference(fake::hashed, backend->max_capacity(), backend->max_slots());
        for (int i = 0; i < 3; ++i) CHECK(answers(*backend, prompts, false) == answers(reference, prompts, false));
        CHECK(state.launches > 0);
        CHECK(stub::current() == 0);
    }
    CHECK(state.memory.empty());
    CHECK(state.locked.empty());
    CHECK(state.streams == 0);
    CHECK(refused([&] { made.open(); }).find("cudaErrorInvalidResourceHandle") != std::string::npos);
}

TEST_CASE("an error that stays is told, and the end is quiet") {
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
            CHECK(text.find("an illegal memory access was encountered (cudaErrorIllegalAddress); nothing computes on the GPU in this "
                            "process any more: start it again") != std::string::npos);
        }
        CHECK_THROWS_AS(backend.step(*cache, 0, input(1, 1), false, output), mars::DeviceLost);
        CHECK(refused([&] { cache->move(0, 1, 2); }).find("start it again") != std::string::npos);
        CHECK(refused([&] { backend.new_cache(1)->reserve(1); }).find("start it again") != std::string::npos);
    }
    stub::reset();
}

TEST_CASE("what stays is known by name and by number") {
    CHECK(mars::is_lasting("Non-zero status code returned while running Attention node. CUDA failure 700: an illegal memory access"));
    CHECK(mars::is_lasting("CUDA error 719 at ..."));
    CHECK(mars::is_lasting("cudaErrorLaunchFailure:unspecified launch failure"));
    for (const char* other : {"CUDA failure 2: out of memory ; GPU=0", "a graph of 700 nodes", "CUDA failure 7001: x", "CUDA failure 700"})
        CHECK(mars::is_lasting(other) == (std::string(other) == "CUDA failure 700"));
}

TEST_CASE("a call that failed leaves no error for TensorRT to find") {
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

TEST_CASE("the stub refuses what TensorRT and CUDA refuse") {
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

    // What is no step does not belong in a capture, and spoils it.
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

TEST_CASE("saved entries stay on the device, serve other rows, and go with the store") {
    const Tokens history{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
    for (const char* layout : {"static", "delta"}) {
        CAPTURE(layout);
        EngineShape shape;
        shape.kv_layout = layout;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        CHECK(!backend.firm_slots()); // an engine has kernels by the size of a step
        const std::int64_t piece = std::min(mars::prefill_chunk, backend.max_slots().value());
        REQUIRE(piece < static_cast<std::int64_t>(history.size()));
        std::vector<Tokens> asked;
        for (const std::int64_t last : {1, 2, 3}) {
            asked.push_back(history);
            asked.back().push_back(last);
        }
        const std::vector<Tokens> expected = answers(backend, asked, false);
        const std::size_t before = stub::state().memory.size();
        {
            mars::Prefixes store(1 << 20, backend.firm_slots());
            for (int round = 0; round < 2; ++round) CHECK(answers(backend, asked, false, 20, 4, &store) == expected);
            const mars::PrefixStats stats = store.stats();
            CHECK(stats.hits == 5);
            CHECK(stats.hit_tokens == 5 * ((static_cast<std::int64_t>(history.size())) / piece * piece));
            CHECK(stats.failed == 0);
            CHECK(stub::state().memory.size() == before + static_cast<std::size_t>(stats.entries));

            // Entries of a bundle are brought to the device once; those of the fake engine are floats.
            const auto cache = backend.new_cache(1);
            const std::int64_t length = 4;
            const std::vector<float> floats(static_cast<std::size_t>(length * cache->entry_bytes()) / sizeof(float), 3.0F);
            const auto* data = reinterpret_cast<const unsigned char*>(floats.data());
            const auto there = cache->bring({nullptr, data, length});
            cache->load(0, *there, length);
            mars::StepOutput output;
            mars::StepInput next = input(1, 3);
            next.kv_length = {length};
            backend.step(*cache, 0, next, false, output); // what was put on the stream is done then
            for (std::size_t tensor = 0; tensor < memory(*cache).addresses.size(); ++tensor)
                CHECK(kv(dynamic_cast<mars::TrtCache&>(*cache), tensor)[0] == 3.0F);
        }
        CHECK(stub::state().memory.size() == before);
    }
    // Without memory for a copy, nothing is saved and the answer goes on.
    const Made made;
    mars::TrtBackend backend = made.open();
    const std::vector<Tokens> expected = answers(backend, {history}, false);
    mars::Prefixes store(1 << 20, backend.firm_slots());
    stub::state().has_no_memory = true;
    CHECK(answers(backend, {history}, false, 20, 4, &store) == expected);
    CHECK(store.stats().failed > 0);
    CHECK(store.stats().num_bytes == 0);
    stub::state().has_no_memory = false;
}

TEST_CASE("an engine without symbols keeps its filling out of the way") {
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
    const float* keys = kv(dynamic_cast<mars::TrtCache&>(*cache), 0);
    const std::int64_t row = 2 * 64 * 4;
    CHECK(keys[row] == 8);
    CHECK(keys[row + 4] == 9);
    CHECK(std::count(keys, keys + row, 0.0F) == row);
    for (std::int64_t other = 2; other < 5; ++other) // rows that nobody asked for write to the end only
        CHECK(std::count(keys + other * row, keys + other * row + 60 * 4, 0.0F) == 60 * 4);
    CHECK(refused([&] { backend.step(*cache, 0, input(1, 5), false, output); }) ==
          "a step of 1 x 5 slots; this engine is for exactly 3 x 4");
}

TEST_CASE("a row near its end shares a step with a row that looks far ahead") {
    for (const bool fixed : {false, true}) {
        CAPTURE(fixed);
        EngineShape shape;
        shape.fixed = fixed;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        const std::vector<Tokens> asked{Tokens(static_cast<std::size_t>(backend.max_capacity() - 2), 5), {6}};
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        CHECK(answers(backend, asked, false, 30) == answers(reference, asked, false, 30));
    }
}

TEST_CASE("block commit with long blocks: a row near its end does not end the others") {
    EngineShape shape;
    shape.prefill = 32;
    shape.capacity = shape.context = 128;
    for (const char* layout : {"static", "delta"}) {
        shape.kv_layout = layout;
        const Made made(shape);
        mars::TrtBackend backend = made.open();
        fake::Backend reference(fake::hashed, backend.max_capacity(), backend.max_slots());
        for (std::int64_t left = 0; left < 8; ++left)
            for (const std::int64_t cache_block : {16, 32}) {
                CAPTURE(left);
                CAPTURE(cache_block);
                const std::vector<Tokens> asked{{6}, Tokens(static_cast<std::size_t>(backend.max_capacity() - left), 5), {7, 8}};
                CHECK(answers(backend, asked, true, 60, cache_block) == answers(reference, asked, true, 60, cache_block));
            }
    }
}

TEST_CASE("what the engine cannot hold is refused") {
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

TEST_CASE("a failing step says what TensorRT said, and the next one works") {
    const Made made;
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    stub::state().fails = true;
    for (int i = 0; i < 2; ++i)
        CHECK(refused([&] { backend.step(*cache, 0, input(1, 2), false, output); }) ==
              "TensorRT failed in a step of 1 x 4 slots: the stub was told to fail");
    stub::state().fails = false;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids == Tokens{fake::hashed({3}, 0).first});
}

TEST_CASE("an engine of another model is refused, each time") {
    for (const std::int64_t slots : {2, 9}) { // decode, prefill
        const Made made;
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(1);
        mars::StepOutput output;
        stub::state().unknown_tensors = {"present.1.key", "kv_length"};
        for (int i = 0; i < 2; ++i)
            CHECK(refused([&] { backend.step(*cache, 0, input(1, slots), false, output); }) ==
                  "the engine and the manifest disagree about kv_length, kv_length, present.1.key; build the engine again");
    }
}

TEST_CASE("an engine whose tensors are not the manifest's is refused before anything is written") {
    const auto refusal = [](const std::string& name, const char* what, const nlohmann::json& value) {
        const Made made;
        stub::state().tensors[name][what] = value;
        return refused([&] { made.open(); });
    };
    const auto names = [](const std::string& name) {
        return "the engine and the manifest disagree about " + name + "; build the engine again";
    };
    CHECK(refusal("past_key_values.1.key", "dtype", "float16") == names("past_key_values.1.key"));
    CHECK(refusal("present.0.value", "dtype", "float16") == names("present.0.value"));
    CHECK(refusal("input_ids", "dtype", "int32") == names("input_ids"));
    CHECK(refusal("confidence", "dtype", "float16") == names("confidence"));
    CHECK(refusal("present.0.key", "shape", {-1, 3, -1, 4}) == names("present.0.key"));
    CHECK(refusal("past_key_values.0.value", "shape", {-1, 2, 4}) == names("past_key_values.0.value"));
    CHECK(refusal("past_key_values.0.value", "shape", {-1, 2, 65, 4}) == names("past_key_values.0.value"));
    CHECK(refusal("present.1.value", "alias", "past_key_values.0.value") == names("present.1.value"));
    CHECK(refusal("token_ids", "name", "tokens") == names("token_ids, tokens"));
    CHECK(refusal("kv_length", "shape", {-1, -1}) == names("kv_length"));
    const auto wide = [](const std::string& name, const char* what, const nlohmann::json& value) {
        EngineShape top_k;
        top_k.top_k = 5;
        const Made made(top_k);
        stub::state().tensors[name][what] = value;
        return refused([&] { made.open(); });
    };
    CHECK(wide("topk_ids", "dtype", "float32") == names("topk_ids"));
    CHECK(wide("topk_logprobs", "shape", {-1, -1}) == names("topk_logprobs"));
    CHECK(wide("topk_logprobs", "shape", {-1, -1, 6}) == names("topk_logprobs"));
    CHECK(wide("topk_ids", "shape", {-1, -1, -1}) == names("topk_ids"));
    CHECK(wide("topk_ids", "shape", {-1, -1, 1001}) == names("topk_ids, topk_logprobs"));
    EngineShape shape;
    shape.kv_layout = "delta";
    const Made made(shape);
    stub::state().tensors["present.1.value"]["alias"] = "past_key_values.1.value";
    CHECK(refused([&] { made.open(); }) == names("present.1.value"));
    CHECK(stub::state().memory.empty());
}

TEST_CASE("a file that is no engine is refused with both sides named") {
    const Made made({}, "garbage");
    const std::string text = refused([&] { made.open(); });
    CHECK(text.find("built with " + mars::tensorrt_flavor() + " 10.16.0.72 (CUDA 12) for sm86, sm89 on") != std::string::npos);
    CHECK(text.find("cannot be loaded here (" + mars::tensorrt_flavor() + " 10.16.0.72; Stub GPU, sm86, driver for CUDA 12.9): ") !=
          std::string::npos);
    CHECK(text.find("the magic tag does not match") != std::string::npos);
    CHECK(text.find("a warning") == std::string::npos);
    CHECK((text.find("malformed engine") != std::string::npos) == (mars::tensorrt_flavor() == "tensorrt_rtx"));
    CHECK(stub::state().memory.empty());
}

TEST_CASE("shapes beyond any memory are refused") {
    EngineShape shape;
    shape.capacity = std::int64_t{1} << 52;
    Made made(shape);
    const auto opened = [&] { made.open().new_cache(1)->reserve(1); };
    CHECK(refused(opened).find("out of memory (cudaErrorMemoryAllocation)") != std::string::npos);
    nlohmann::json engine = nlohmann::json::parse(stub_engine(shape));
    engine["kv_heads"] = engine["head_dim"] = made.bundle.manifest.model.num_kv_heads = made.bundle.manifest.model.head_dim = 65536;
    std::ofstream(made.bundle.path / "rtx.engine") << engine;
    CHECK(refused(opened) == "the engine's shapes are beyond any memory; build it again");
    CHECK(stub::state().memory.empty());
    shape.capacity = 3;
    shape.fixed = true;
    const Made small(shape);
    CHECK(refused([&] { small.open(); }).find("less than one step") != std::string::npos);
}

TEST_CASE("the machine is asked") {
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
    CHECK(look_around().no_gpu == "no NVIDIA GPU with a working driver is here (check with nvidia-smi)");
}

TEST_CASE("many threads over one engine") {
    const Made made;
    auto backend = std::make_unique<mars::TrtBackend>(made.bundle, made.bundle.manifest.variants.front());
    fake::Backend reference(fake::hashed, backend->max_capacity(), backend->max_slots());
    const auto expected = answers(reference, prompts, false);
    std::vector<std::thread> threads;
    std::vector<int> equal(4);
    for (int& count : equal)
        threads.emplace_back([&] {
            for (int i = 0; i < 10; ++i) count += answers(*backend, prompts, false) == expected;
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(equal == std::vector<int>(4, 10));
}

#ifdef MARS_STUB_RTX
TEST_CASE("kernels are kept beside the bundle, and read at the next start") {
    const Made made;
    const auto file = made.bundle.path.parent_path() / ".a.bundle.rtx-0123456789ab.kernels";
    for (int start = 0; start < 2; ++start) {
        mars::TrtBackend backend = made.open();
        const auto cache = backend.new_cache(1);
        mars::StepOutput output;
        for (int i = 0; i < 4; ++i) backend.step(*cache, 0, input(1, 2), false, output);
        CHECK(std::filesystem::file_size(file) == std::string("kernels k").size() + static_cast<std::size_t>(start));
    }
    std::filesystem::remove(file);
    std::filesystem::create_directory(file); // a place that cannot be written changes nothing else
    mars::TrtBackend backend = made.open();
    const auto cache = backend.new_cache(1);
    mars::StepOutput output;
    backend.step(*cache, 0, input(1, 2), false, output);
    CHECK(output.token_ids.size() == 1);
    CHECK(std::distance(std::filesystem::directory_iterator(made.bundle.path.parent_path()), {}) == 2);
}
#endif
