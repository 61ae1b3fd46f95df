// CUDA graphs of ONNX Runtime's CUDA provider: which steps are captured, under which number, and whether what they say is right. Twin of
// runtime/device/ort_graphs.py.
//
// With `enable_cuda_graph` the provider captures the kernels of a run under the number that the run's options give, and replays them for later
// runs of that number: with the addresses and shapes of the capture, and with what operators on the CPU had computed then. So a number stands
// for one set of addresses and shapes, and numbers are few, because captured steps are kept as long as the session. Whether replays see all
// of a step's inputs is tried when a session is opened, on rows of nobody: a wrong one may write anywhere in a row.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "decode/backend.hpp"
#include "device/ort_memory.hpp"

namespace mars {

constexpr const char* graph_number = "gpu_graph_id"; ///< of a run's options
constexpr const char* plain_number = "-1";           ///< captures nothing and replays nothing

/// A result of a step, with so many numbers for each prediction.
struct StepResult {
    std::string name;
    std::int64_t width;
};

/// A step of one shape on one memory: bound for good, as its capture is. Inputs and results lie on the device, and have mirrors on the host.
class CapturedStep {
  public:
    /// Of the shape of `input`, which is written before it is bound: what the graph reads on the host is copied then. KV rows are still to be
    /// bound.
    CapturedStep(std::shared_ptr<OrtMemory> memory, Ort::Session& session, std::int64_t number, const StepInput& input,
                 const std::vector<StepResult>& results);

    void write(const StepInput& input);

    /// The first `outputs` predictions of each row.
    void read(std::int64_t outputs, StepOutput& output);

    Ort::IoBinding binding;
    Ort::RunOptions options; ///< nobody's interruption reaches them: half a step would be captured
    std::int64_t runs = 0;

  private:
    const std::shared_ptr<OrtMemory> memory_;
    const std::int64_t rows_, outputs_;
    std::vector<std::size_t> given_;                                  // where input_ids, kv_length and output_index begin
    std::map<std::string, std::pair<std::size_t, std::int64_t>> got_; // where each result begins, and its width
    OrtBlock there_given_, there_got_, here_given_, here_got_;
};

/// The captured steps of one session.
class OrtGraphs {
  public:
    /// What a step is captured for: shapes, and the addresses of KV rows.
    using Key = std::vector<std::int64_t>;
    using Bind = std::function<std::shared_ptr<CapturedStep>(std::int64_t number)>;

    static constexpr std::size_t most = 128;       ///< captured steps of a session
    static constexpr std::size_t most_seen = 4096; ///< shapes that are remembered to have come once

    /// `close`: how far confidences of two equal steps may lie apart.
    OrtGraphs(std::int64_t block, double close);

    /// A captured step of few slots takes as long as one of a few more, and each size has its own.
    const std::set<std::int64_t>& sizes() const { return sizes_; }

    /// The step in one of the sizes, filled up with slots and predictions that nobody asked for; nothing for one that is wider than all.
    std::optional<StepInput> filled(const StepInput& input) const;

    /// The step of this key. None for one that is to run plainly: it never came before, or there are as many as there may be.
    std::shared_ptr<CapturedStep> find(const Key& key, const Bind& bind);

    /// Whether two steps with the same inputs said the same.
    bool agree(const StepOutput& found, const StepOutput& right) const;

    /// Replay nothing any more.
    void give_up(const std::string& why);

    /// Steps that were captured.
    std::size_t count() const;

    /// Why no step is replayed any more.
    const std::optional<std::string>& reason() const { return reason_; }

  private:
    const std::set<std::int64_t> sizes_;
    const double close_;
    std::map<Key, std::shared_ptr<CapturedStep>> steps_;
    std::set<Key> seen_;
    std::optional<std::string> reason_;
};

} // namespace mars
