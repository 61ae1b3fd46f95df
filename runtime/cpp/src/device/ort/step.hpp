// A loaded step graph: binds a step's tensors and runs it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/ort/api.hpp"
#include "device/ort/memory.hpp"
#include "device/ort/rows.hpp"
#include "device/ort/signature.hpp"

namespace mars {

struct OrtStep {
    std::unique_ptr<OrtRows> new_rows(std::int64_t num_rows) const;

    void run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output);

    std::filesystem::path file;
    OrtSignature signature;
    std::int64_t max_capacity = 0, top_k = 0, element_bytes = 0;
    bool is_firm = false;            // whether KV entries have the same bits whichever step wrote them
    bool are_rows_bound_once = true; // if false, the graph runs elsewhere and binding copies the rows, so they are bound at every step
    std::atomic<std::chrono::steady_clock::rep> run_time{0};
    std::shared_ptr<OrtGraph> opened;
    std::shared_ptr<RowMemory> memory = host_memory();
    Ort::MemoryInfo host{nullptr}, rows_info{nullptr};

  private:
    /// Bind rows first, first + 1, ... as the graph's past and present.
    void bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const;

    template <typename T>
    Ort::Value tensor(const std::vector<T>& values, const std::vector<std::int64_t>& shape) const;

    template <typename T>
    void bind_result(OrtRows& rows, const std::string& name, std::vector<T>& values, const std::vector<std::int64_t>& shape) const;

    void bind_results(OrtRows& rows, const StepInput& input, bool want_logits, StepOutput& output) const;
};

} // namespace mars
