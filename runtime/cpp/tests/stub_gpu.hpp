// A GPU that is the stub of ONNX Runtime's CUDA provider: backends and sessions on it, and on the host beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <mars/session.hpp>

#include "answers.hpp"
#include "device/ort.hpp"
#include "named_bundle.hpp"
#include "ort_stub/cuda_provider.hpp"

using Tokens = std::vector<std::int64_t>;
using Numbers = std::vector<std::int64_t>;

inline const mars::OrtOptions on{{"enable_cuda_graph", "1"}};

/// A new stub, which no rule of was broken when the test ends.
struct Gpu {
    Gpu() { ort_stub() = {}; }
    ~Gpu() {
        for (const std::string& rule : ort_stub().violations) CHECK_MESSAGE(false, rule);
    }
    OrtStub& stub = ort_stub();
    std::vector<std::string> said;

    std::unique_ptr<mars::OrtBackend> opened(const mars::OrtOptions& options = on) {
        const mars::Bundle found = bundle();
        const auto hear = [this](mars::LogLevel, std::string_view words) { said.emplace_back(words); };
        return std::make_unique<mars::OrtBackend>(found, found.manifest.variants.front(), "cuda", 1, options, hear);
    }

    bool has_said(const std::string& words) const { return std::find(said.begin(), said.end(), words) != said.end(); }

    /// Numbers of all runs from this one on.
    std::set<std::int64_t> numbers(std::size_t from) const {
        std::set<std::int64_t> all;
        for (std::size_t i = from; i < stub.runs.size(); ++i) all.insert(stub.runs[i].number);
        return all;
    }
};

/// A session over a backend that can still be asked.
struct Served {
    explicit Served(std::unique_ptr<mars::OrtBackend> opened, std::int64_t cache_bytes = 0)
        : backend(*opened), session(mars::Opened::over(bundle(), std::move(opened), std::nullopt, cache_bytes)) {}
    mars::OrtBackend& backend;
    mars::Session session;
};

/// A session on the CPU, the one there is.
inline const mars::Session& host() {
    static const mars::Session one = [] {
        const mars::Bundle found = bundle();
        return mars::Opened::over(bundle(), std::make_unique<mars::OrtBackend>(found, found.manifest.variants.front(), "cpu", 1),
                                  std::nullopt, 0);
    }();
    return one;
}

inline const std::vector<Tokens> prompts{some_ids(3, 5), some_ids(12, 2), some_ids(40, 1), some_ids(300, 3)};

/// The answers to all prompts are the host's.
inline void check_answers(const mars::Session& session, const mars::GenerationConfig& config, const mars::Commit& commit = {}) {
    for (const Tokens& prompt : prompts)
        CHECK(session.generate(prompt, config, nullptr, commit).token_ids == host().generate(prompt, config, nullptr, commit).token_ids);
}

/// A step of `rows` rows from row `first` on, at the same cursor.
inline mars::StepOutput step(mars::Backend& backend, mars::Cache& cache, std::int64_t first, std::int64_t rows, std::int64_t start,
                             std::int64_t slots, std::int64_t outputs, bool want_topk = false) {
    mars::StepInput input{rows, slots, outputs, {}, Numbers(static_cast<std::size_t>(rows), start), {}, want_topk};
    for (std::int64_t row = 0; row < rows; ++row) {
        const Tokens ids = some_ids(start + slots, first + row);
        input.input_ids.insert(input.input_ids.end(), ids.begin() + start, ids.end());
        for (std::int64_t i = 0; i < outputs; ++i) input.output_index.push_back((i + start) % slots);
    }
    cache.reserve(start + slots);
    mars::StepOutput output;
    backend.step(cache, first, input, false, output);
    return output;
}
