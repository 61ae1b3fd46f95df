// runtime/device/trt/engine.py: a loaded engine, its log, its execution contexts, and RTX's file of kernels.
// With TensorRT 10.3 or newer, or TensorRT-RTX (which defines TRT_MAJOR_RTX).
#pragma once

#include <NvInfer.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bundle/bundle.hpp"
#include "device/cuda.hpp"
#include "joined.hpp"
#include "log.hpp"

namespace mars {

/// The manifest's name of the TensorRT this library was built with: `tensorrt` or `tensorrt_rtx`.
std::string tensorrt_flavor();

/// The version of the loaded TensorRT, such as `10.16.0.72`.
std::string tensorrt_version();

/// An execution context, for one kind of step at a time.
using Context = std::unique_ptr<nvinfer1::IExecutionContext>;

/// Whether a context's step can be captured as a graph, as far as TensorRT can tell. `stream`: a cudaStream_t.
bool is_capturable(nvinfer1::IExecutionContext& context, void* stream);

nvinfer1::Dims dims_of(const std::vector<std::int64_t>& shape);

/// An input or output of an engine. `dtype` as in a manifest, "" for other types. -1 in `shape` if symbolic. `alias`:
/// the input whose memory an output writes, "" if none or unknown to this TensorRT.
struct EngineTensor {
    std::string name, dtype;
    std::vector<std::int64_t> shape;
    std::string alias;
};

/// TensorRT's log, forwarded. It keeps recent errors for messages; TensorRT calls it from any thread.
class EngineLog : public nvinfer1::ILogger {
  public:
    explicit EngineLog(OnLog on_log = nullptr) : on_log_(std::move(on_log)) {}

    void log(Severity severity, const char* message) noexcept override {
        const bool is_error = severity == Severity::kERROR || severity == Severity::kINTERNAL_ERROR;
        if (severity == Severity::kVERBOSE) return;
        note(on_log_, is_error ? LogLevel::error : severity == Severity::kWARNING ? LogLevel::warning : LogLevel::info, message);
        if (!is_error) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        errors_.emplace_back(message);
        if (errors_.size() > most) errors_.pop_front();
    }

    /// The latest `count` errors, one a line.
    std::string last(std::size_t count) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::vector<std::string> latest(errors_.end() - static_cast<std::ptrdiff_t>(std::min(count, errors_.size())), errors_.end());
        return latest.empty() ? "it gave no reason" : joined(latest, "\n  ");
    }

  private:
    static constexpr std::size_t most = 20;

    const OnLog on_log_;
    mutable std::mutex mutex_;
    std::deque<std::string> errors_;
};

/// An engine in device memory.
class LoadedEngine {
  public:
    /// Load a variant's engine on the current GPU; `on_log` receives TensorRT's log. Throws SessionError with TensorRT's
    /// reasons.
    LoadedEngine(const Bundle& bundle, const Variant& variant, OnLog on_log = nullptr);

    std::vector<EngineTensor> tensors() const;

    /// Bytes of working memory, shared by all contexts, one step at a time.
    std::size_t scratch_bytes() const { return static_cast<std::size_t>(engine_->getDeviceMemorySizeV2()); }

    /// A context for one optimization profile. Throws SessionError if TensorRT refuses.
    Context new_context(std::size_t range_index, Address scratch, void* stream) const;

    std::string last_error() const { return log_.last(1); }

    /// Write RTX's compiled kernels to the file beside the bundle if there are new ones, so that the next start is
    /// fast.
    void keep_kernels();

  private:
    EngineLog log_; // must outlive what reports to it
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
#ifdef TRT_MAJOR_RTX
    void prepare_kernels();

    std::unique_ptr<nvinfer1::IRuntimeConfig> config_;
    std::unique_ptr<nvinfer1::IRuntimeCache> cache_;
    std::filesystem::path kernels_;    // empty: not written
    std::size_t num_kernel_bytes_ = 0; // size of that file
#endif
};

} // namespace mars
