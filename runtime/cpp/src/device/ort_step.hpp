// A step graph that is loaded, and one step of it as it comes: what is bound where, and the run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/ort_api.hpp"
#include "device/ort_memory.hpp"
#include "device/ort_rows.hpp"
#include "device/ort_signature.hpp"
#include "device/scratch.hpp"
#include "device/worker.hpp"

namespace mars {

struct OrtStep {
    std::unique_ptr<OrtRows> new_rows(std::int64_t num_rows) const;

    /// Rows first, first + 1, ... as the graph's past and present.
    void bind_kv(Ort::IoBinding& binding, OrtRows& rows, std::int64_t first, std::int64_t count) const;

    void run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output);

    /// ONNX Runtime's run, with a look at the clock. Throws Ort::Exception.
    void compute(const Ort::RunOptions& options, const Ort::IoBinding& binding);

    OrtSignature signature;
    std::int64_t top_k = 0, element_bytes = 0;
    bool on_cpu = true;
    std::atomic<std::chrono::steady_clock::rep> run_time{0};
    std::optional<Scratch> scratch; // on the CPU
    std::shared_ptr<OrtGraph> opened;
    std::shared_ptr<OrtMemory> memory; // of KV rows on a device; without it they are in host memory, and cross off the CPU
    std::shared_ptr<Worker> worker;    // of a session that captures steps
    Ort::MemoryInfo host{nullptr};

  private:
    /// Where a step's inputs and results are on their way: in memory that the device copies from and to, or where the caller has them.
    struct Way {
        struct Result {
            unsigned char *target, *source;
            std::size_t num_bytes;
        };
        unsigned char* next = nullptr;
        std::vector<Result> results;
    };

    template <typename T>
    Ort::Value tensor(Way& way, const std::vector<T>& values, const std::vector<std::int64_t>& shape, bool is_result) const;

    template <typename T>
    void bind_result(OrtRows& rows, Way& way, const std::string& name, std::vector<T>& values,
                     const std::vector<std::int64_t>& shape) const;

    void bind_results(OrtRows& rows, Way& way, const StepInput& input, bool want_logits, StepOutput& output) const;

    /// The way of one step on these rows.
    Way way(OrtRows& rows, const StepInput& input, bool want_logits) const;
};

} // namespace mars
