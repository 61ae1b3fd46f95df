// A bundle with one TensorRT engine of the stub in it, and what tests ask its backend.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include <mars/errors.hpp>

#include "decode/prefix.hpp"
#include "device/trt/backend.hpp"
#include "engine_manifest.hpp"
#include "fake.hpp"
#include "loops.hpp"
#include "trt_stub/stub.hpp"

using Tokens = fake::Tokens;

inline const std::vector<Tokens> prompts{{5, 6, 7}, {9}, {11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30}};

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

/// What the loop accepts after each prompt; the first may take `most` tokens, each other one less than the one before it.
inline std::vector<Tokens> answers(mars::Backend& backend, const std::vector<Tokens>& asked, std::int64_t cache_block = 1,
                                   std::int64_t most = 20, mars::PrefixCache* store = nullptr, std::optional<double> tau = 0.5) {
    std::vector<std::unique_ptr<mars::Sequence>> rows;
    std::vector<mars::Sequence*> pointers;
    for (const Tokens& prompt : asked) {
        mars::GenerationConfig config;
        config.tau = tau; // none: exact mode
        config.max_new_tokens = most--;
        rows.push_back(std::make_unique<mars::Sequence>(static_cast<std::int64_t>(rows.size()), prompt, config, Tokens{}));
        if (store != nullptr) rows.back()->prefix_handle = store->handle();
        pointers.push_back(rows.back().get());
    }
    const auto loop = loops::decode(backend, pointers, 4, fake::mask, cache_block);
    while (loop->next()) {
    }
    std::vector<Tokens> all;
    for (const auto& row : rows) all.push_back(row->tokens);
    return all;
}

/// A step at the beginning of `rows` rows that wants the prediction of the first slot.
inline mars::StepInput input(std::int64_t rows, std::int64_t slots, std::int64_t token = 3) {
    const auto count = static_cast<std::size_t>(rows);
    return {rows, slots, 1, Tokens(count * static_cast<std::size_t>(slots), token), Tokens(count, 0), Tokens(count, 0)};
}

inline const float* kv(mars::GpuCache& cache, std::size_t tensor) {
    return reinterpret_cast<const float*>(cache.memory().addresses[tensor]);
}

inline const mars::KvMemory& memory(mars::Cache& cache) { return dynamic_cast<mars::GpuCache&>(cache).memory(); }

/// The message that a call is refused with.
inline std::string refused(const std::function<void()>& call) {
    try {
        call();
    } catch (const mars::SessionError& error) {
        return error.what();
    }
    return "nothing was refused";
}
