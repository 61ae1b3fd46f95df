// runtime/device/trt/backend.py: KV memory on the device, and decode steps replayed as CUDA graphs.
#pragma once

#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/pool.hpp"
#include "device/shape_bucket.hpp"
#include "device/step_io.hpp"
#include "device/trt/engine.hpp"

namespace mars {

/// An engine variant on a GPU. KV memory, input and output buffers are allocated once; a step copies only token ids and
/// predictions.
class TrtBackend : public Backend {
  public:
    /// Throws SessionError that names what the engine was built for and what this machine has.
    TrtBackend(const Bundle& bundle, const Variant& variant, const EngineOptions& options = {});
    ~TrtBackend() override;
    TrtBackend(const TrtBackend&) = delete;
    TrtBackend& operator=(const TrtBackend&) = delete;

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return info_.max_slots(); }
    std::optional<std::int64_t> max_outputs() const override { return info_.max_outputs(); }
    std::int64_t max_capacity() const override { return max_capacity_; }
    std::int64_t max_entries() const override { return capacity_; }
    std::optional<std::int64_t> free_memory() const override { return pool_->device.free_memory(); }
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override;
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    /// Number of steps that are replayed as CUDA graphs.
    std::size_t num_graphs() const;

  private:
    /// The binding of an execution context: a range, sizes, and rows of KV memory. `rows` is -1 if it is not bound.
    struct Shape {
        std::size_t range = 0;
        std::int64_t slots = 0, outputs = 0;
        Address memory = 0;
        std::int64_t first = 0, rows = -1;

        auto key() const { return std::tie(range, slots, outputs, memory, first, rows); }
    };

    /// An execution context: one for each range, slots and outputs of decode steps, and one for each prefill range.
    /// `graph` replays the step it is bound to and is destroyed before the context is bound to another.
    struct Step {
        Context context; // must outlive the graph captured from it
        Shape shape;
        std::int64_t num_bytes = 0; // device memory of the context
        std::int64_t runs = 0;
        Device::Graph graph;
        bool is_refused = false;
    };

    bool is_decode(std::size_t range) const { return info_.ranges[range].name == "decode"; }
    void check_signature(const std::string& kv_dtype) const;
    void forget(Address memory);
    std::list<Step>::iterator add_context(std::size_t range, std::int64_t slots, std::int64_t outputs);
    void add_common_contexts();
    Step& step_for(const KvMemory& memory, std::int64_t first, const StepInput& input);
    void bind(Step& step, const KvMemory& memory);
    void run(Step& step);
    Runs fresh_runs(const Shape& shape) const;
    void place(const KvMemory& memory, const Shape& shape, const std::vector<std::int64_t>& kv_length);

    std::vector<std::string> outputs_, suffixes_;
    EngineInfo info_;
    ModelInfo model_;
    std::int64_t capacity_, max_capacity_;
    bool in_place_, is_exact_;
    std::shared_ptr<KvPool> pool_;
    std::optional<LoadedEngine> engine_;
    std::optional<ShapeBucket> shape_bucket_;
    StepIO io_;
    Address fresh_ = 0; // new entries of a `appended` engine, one tensor after the other
    Address scratch_ = 0;
    std::list<Step> steps_; // most recently used first
    std::int64_t context_bytes_ = 0, most_context_bytes_ = std::numeric_limits<std::int64_t>::max();
};

} // namespace mars
