// The TensorRT backend: KV memory on the device, written in place, and decode steps replayed as CUDA graphs. Twin of runtime/device/trt.py.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/backend.hpp"
#include "device/filling.hpp"
#include "device/kv_pool.hpp"
#include "device/step_io.hpp"
#include "device/trt_engine.hpp"

namespace mars {

/// An engine variant on a GPU. KV memory, input and output buffers are allocated once; a step copies ids in and ids out.
class TrtBackend : public Backend {
  public:
    /// On the GPU of that number. Throws SessionError that names what the engine was built for and what is here.
    TrtBackend(const Bundle& bundle, const Variant& variant, int gpu = 0);
    ~TrtBackend() override;
    TrtBackend(const TrtBackend&) = delete;
    TrtBackend& operator=(const TrtBackend&) = delete;

    const std::vector<std::string>& outputs() const override { return outputs_; }
    std::optional<std::int64_t> max_slots() const override { return info_.max_slots(); }
    std::optional<std::int64_t> max_outputs() const override { return info_.max_outputs(); }
    std::int64_t max_capacity() const override { return max_capacity_; }
    std::int64_t max_entries() const override { return capacity_; }
    std::unique_ptr<Cache> new_cache(std::int64_t num_rows) override;
    void step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) override;

    /// Steps that are replayed as CUDA graphs.
    std::size_t num_graphs() const;

  private:
    /// What distinguishes one captured step from another: the engine's range, the cache rows and the sizes.
    struct Shape {
        std::size_t range;
        Address memory;
        std::int64_t first, rows, slots, outputs;

        auto key() const { return std::tie(range, memory, first, rows, slots, outputs); }
    };

    /// An execution context bound to one Shape. `graph` replays it; empty until it was captured, or for ever if that is refused.
    struct Step {
        Context context; // outlives the graph that was captured from it
        Shape shape;
        std::int64_t runs = 0;
        Device::Graph graph;
        bool is_decode = false, is_refused = false;
    };

    void check_signature(const std::string& kv_dtype) const;
    void forget(Address memory);
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
    std::optional<Filling> filling_;
    StepIO io_;
    Address fresh_ = 0; // what a `delta` engine gives, one tensor behind the other
    Address scratch_ = 0;
    std::list<Step> decode_; // newest first
    std::map<std::size_t, Step> prefill_;
};

} // namespace mars
