// runtime/device/ort/cuda_backend.py: ONNX Runtime on a GPU: steps of a few shapes, at fixed addresses, replayed as CUDA graphs.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/ort/open.hpp"
#include "device/pool.hpp"
#include "device/step_io.hpp"

namespace mars {

/// An ONNX variant that writes its KV entries in place, on a GPU. Every decode step has the same number of slots, so that it
/// is captured once for each number of rows; the padding comes after the real slots, and its entries are overwritten. Only graphs in the layout "cuda" are
/// captured.
class CudaBackend : public Backend {
  public:
    /// Load a dynamic ONNX variant of a bundle on a GPU ("cuda", "cuda:1"). Throws SessionError if this ONNX Runtime lacks the
    /// provider or the graph does not load, and BundleError if graph and manifest disagree.
    CudaBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings = {});

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return *sizes_.rbegin(); }
    std::optional<std::int64_t> max_outputs() const override { return decode_slots_; }
    std::int64_t max_capacity() const override { return model_.context_length; }
    std::optional<std::int64_t> free_memory() const override { return pool_->device.free_memory(); }
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override { return std::make_unique<GpuCache>(pool_, num_rows); }
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    std::int64_t decode_slots() const { return decode_slots_; }

    /// Number of steps that are replayed as CUDA graphs.
    std::size_t num_graphs() const { return static_cast<std::size_t>(num_graphs_); }

  private:
    /// Where and how large a step is: address, rows and capacity of the KV memory; first row, rows, and slots.
    using Shape = std::array<std::int64_t, 6>;

    /// The binding of one shape, and how often it ran in the thread that ran it last: ONNX Runtime has a captured step for each
    /// thread. `graph_id` is 0 if it is not captured.
    struct BoundShape {
        Shape shape;
        Ort::IoBinding binding;
        Ort::RunOptions captured{nullptr};
        std::int64_t graph_id = 0, runs = 0;
        std::thread::id thread = {};
    };

    void open(const Bundle& bundle, const Variant& variant, OrtParts& options, OrtSettings settings);
    StepIO& io_for(std::int64_t rows);
    BoundShape& bound_for(const Shape& shape, const KvMemory& memory, const StepIO& io);
    bool run(BoundShape& bound, bool is_decode);

    const std::vector<std::string> outputs_, suffixes_;
    const ModelInfo model_;
    const KvTensor kv_;
    std::int64_t decode_slots_;
    std::set<std::int64_t> sizes_; // slots of a step
    bool captures_ = true;
    std::int64_t num_graphs_ = 0;
    std::map<std::string, std::int64_t> widths_;
    std::shared_ptr<KvPool> pool_;
    std::map<std::int64_t, StepIO> ios_; // by the most rows of a step; their addresses never change
    OrtGraph graph_;
    Ort::MemoryInfo place_{nullptr};
    Ort::RunOptions eager_{nullptr};
    std::list<BoundShape> shapes_; // most recently used first
};

} // namespace mars
