// Builds a serialized engine from an ONNX file (exporter/tensorrt/build.py). Only build.cpp uses TensorRT's builder and
// parser.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "bundle/bundle.hpp"

namespace mars {

/// The CUDA major version that this program was built for, such as `12`.
std::string cuda_version();

/// Whether this TensorRT builds for GPUs that are not in this machine, as RTX does.
bool builds_for_others();

/// A serialized engine.
class BuiltEngine {
  public:
    struct Held;
    explicit BuiltEngine(std::unique_ptr<Held> held);
    ~BuiltEngine();
    BuiltEngine(BuiltEngine&&) noexcept;

    const void* data() const;
    std::size_t size() const;

  private:
    std::unique_ptr<Held> held_;
};

/// Called with the finished share of the build, 0 to 1, in the building thread; false cancels the build.
using BuildProgress = std::function<bool(double share)>;

/// Parse, check and build `graph`, an ONNX file with the variant's capacity and its weights beside it, for the
/// variant's ranges and GPUs.
///
/// `workspace`: bytes of device memory that a layer may use for itself, 0 for TensorRT's default. float32 products are
/// computed in TF32 only if the variant says so.
///
/// Throws SessionError with TensorRT's message, or if the parser lost something that the result depends on, and
/// Interrupted if `progress` cancelled the build.
BuiltEngine build_engine(const std::filesystem::path& graph, const Variant& variant, const ModelInfo& model, const BuildProgress& progress,
                         std::int64_t workspace = 0);

} // namespace mars
