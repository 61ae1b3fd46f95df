// The ONNX Runtime backend: IO binding by address, KV written in place, on the host or on a device. Sources device/ort* alone name
// onnxruntime.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mars/config.hpp>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/ort_options.hpp"
#include "device/ort_place.hpp"

namespace mars {

/// A step graph in an ONNX Runtime session.
class OrtBackend : public Backend {
  public:
    /// Load a dynamic ONNX variant of a bundle on `device`: an execution provider's name, with or without "ExecutionProvider",
    /// in any case, and a number behind a colon ("cpu", "CUDA", "tensorrt", "cuda:1"). `threads`: compute threads, nothing for ONNX Runtime's choice. `on_log` hears ONNX
    /// Runtime's warnings and errors of this graph, from any thread.
    ///
    /// KV rows are in `place`, or where `place_of` says; where they cannot stay there (tried when the graph is opened), in host memory,
    /// and the log says why.
    ///
    /// Steps are captured where the CUDA provider's option `enable_cuda_graph` asks for it; where they cannot be, they run plainly, and the
    /// log says why. All sessions of a process that capture compute in one thread.
    ///
    /// Throws SessionError when the provider is not in this ONNX Runtime (it lists those that are) or the graph does not
    /// load, BundleError when graph and manifest disagree. Never falls back to another device.
    OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, std::optional<int> threads,
               const OrtOptions& options = {}, OnLog on_log = nullptr, const std::optional<OrtPlace>& place = std::nullopt);
    ~OrtBackend() override;

    const std::vector<std::string>& outputs() const override;
    std::optional<std::int64_t> max_slots() const override { return std::nullopt; }
    std::int64_t max_capacity() const override;
    std::optional<std::int64_t> firm_slots() const override;
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override;
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    /// Seconds inside ONNX Runtime's Run since the graph was loaded, of all threads together: the rest of a step is ours.
    double run_seconds() const;

    /// Whether KV rows are in a device's memory, where no step copies them from or to the host.
    bool is_on_device() const;

    /// Steps that are replayed as CUDA graphs.
    std::size_t num_graphs() const;

    /// Why steps are not captured, or no longer, although that was asked for.
    std::optional<std::string> why_no_graphs() const;

    /// Bytes between host and device, where KV rows are on a device.
    OrtTraffic traffic() const;

    /// Names of the execution providers of the ONNX Runtime this library runs with.
    static std::vector<std::string> devices();

    /// Version of that ONNX Runtime, such as "1.24.1".
    static std::string version();

  private:
    struct Graph;
    std::unique_ptr<Graph> graph_;
};

} // namespace mars
