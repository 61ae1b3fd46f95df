// ONNX file -> serialized engine. Twin of exporter/tensorrt/build.py; its source is the only one that names TensorRT's builder and parser.
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

/// Whether this TensorRT builds for GPUs that are not here (RTX does); else it builds for the one that is.
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

/// Called with what share of the build is done, from 0 to 1, in the thread that builds; false ends the build.
using BuildProgress = std::function<bool(double share)>;

/// Parse, check and build `graph`, an ONNX file with the variant's capacity and its weights beside it, for the variant's ranges and GPUs.
///
/// `workspace`: bytes of device memory that a layer may use for itself, 0 for TensorRT's default. Products of float32 are computed in TF32 only
/// where the variant says so.
///
/// Throws SessionError with TensorRT's own words, or for a network in which the parser lost what the result depends on, and Interrupted
/// when `progress` ended the build.
BuiltEngine build_engine(const std::filesystem::path& graph, const Variant& variant, const ModelInfo& model, const BuildProgress& progress,
                         std::int64_t workspace = 0);

} // namespace mars
