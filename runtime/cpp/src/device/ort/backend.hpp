// runtime/device/ort/backend.py: ONNX Runtime with KV rows in host memory, bound by address and written in place.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/ort/api.hpp"
#include "device/ort/open.hpp"
#include "device/ort/rows.hpp"
#include "machine.hpp"

namespace mars {

/// A step graph in an ONNX Runtime session.
class OrtBackend : public Backend {
  public:
    /// Load a dynamic ONNX variant of a bundle on `device`: an execution provider's name, with or without
    /// "ExecutionProvider", in any case, optionally with a number ("cpu", "openvino"). CUDA has a CudaBackend.
    ///
    /// Throws SessionError if this ONNX Runtime lacks the provider or the graph does not load, and BundleError if graph
    /// and manifest disagree. Never falls back to another device.
    OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings = {});

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return std::nullopt; }
    std::optional<std::int64_t> max_outputs() const override {
        return model_.recurrent ? std::optional(StateRows::max_outputs) : std::nullopt;
    }
    std::int64_t max_capacity() const override { return model_.context_length; }
    std::optional<std::int64_t> reproducible_slots() const override { return is_firm_ ? std::optional<std::int64_t>(2) : std::nullopt; }
    std::optional<std::int64_t> free_memory() const override { return available_memory(); }
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override;
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    /// Seconds in ONNX Runtime's Run since the graph was loaded, summed over all threads. The rest of a step's time is
    /// libmars's own.
    double run_seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::duration(run_time_)).count(); }

    /// The execution providers of the loaded ONNX Runtime.
    static std::vector<std::string> devices();

    /// Its version, such as "1.24.1".
    static std::string version();

  private:
    void run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output);
    void bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const;
    void bind_results(OrtRows& rows, const StepInput& input, bool want_logits, StepOutput& output) const;

    template <typename T>
    Ort::Value tensor(const std::vector<T>& values, const std::vector<std::int64_t>& shape) const;

    const std::vector<std::string> outputs_, suffixes_;
    const ModelInfo model_;
    const KvTensor kv_;
    std::int64_t top_k_ = 0; // likeliest tokens that the graph gives for each prediction
    bool is_firm_ = false;
    bool are_rows_bound_once_ = true; // if false, the graph runs elsewhere and binding copies the rows, so they are bound at every step
    std::atomic<std::chrono::steady_clock::rep> run_time_{0};
    OrtGraph graph_;
    Ort::MemoryInfo host_{nullptr}, rows_info_{nullptr}; // of inputs and results, and of KV rows
};

} // namespace mars
