// The ONNX Runtime backend: IO binding by address, KV written in place, on the host or a device.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/ort/memory.hpp"
#include "device/ort/options.hpp"

namespace mars {

struct OrtStep;

/// A step graph in an ONNX Runtime session.
class OrtBackend : public Backend {
  public:
    /// Load a dynamic ONNX variant of a bundle on `device`: an execution provider's name, with or without
    /// "ExecutionProvider", in any case, optionally with a number ("cpu", "CUDA", "tensorrt", "cuda:1").
    ///
    /// KV rows are in `memory`; by default in the GPU's for CUDA, otherwise in the host's.
    ///
    /// Throws SessionError if this ONNX Runtime lacks the provider or the graph does not load, and BundleError if graph
    /// and manifest disagree. Never falls back to another device.
    OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings = {},
               std::shared_ptr<RowMemory> memory = nullptr);
    ~OrtBackend() override;

    const std::vector<std::string>& outputs() const override;
    std::optional<std::int64_t> max_slots() const override { return std::nullopt; }
    std::int64_t max_capacity() const override;
    std::optional<std::int64_t> firm_slots() const override;
    std::optional<std::int64_t> free_memory() const override;
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override;
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    /// Seconds in ONNX Runtime's Run since the graph was loaded, summed over all threads. The rest of a step's time is
    /// libmars's own.
    double run_seconds() const;

    /// The execution providers of the loaded ONNX Runtime.
    static std::vector<std::string> devices();

    /// Its version, such as "1.24.1".
    static std::string version();

  private:
    std::unique_ptr<OrtStep> graph_;
};

} // namespace mars
