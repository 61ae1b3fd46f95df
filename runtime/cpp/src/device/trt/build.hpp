// Builds a serialized engine from an ONNX file (exporter/tensorrt/build.py). Only build.cpp uses TensorRT's parser.
#pragma once

#include <NvInfer.h>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"

namespace mars {

/// The CUDA major version that this program was built for, such as `12`.
std::string cuda_version();

/// Whether this TensorRT builds for GPUs that are not in this machine, as RTX does.
bool builds_for_others();

/// A build was cancelled.
class Interrupted : public DeviceError {
  public:
    using DeviceError::DeviceError;
};

/// Called with the finished share of the build, 0 to 1, in the building thread; false cancels the build.
using BuildProgress = std::function<bool(double share)>;

/// Parse and check `graph`, and build it as a serialized engine for the variant's ranges and GPUs. `graph` is an ONNX
/// file with the variant's capacity and its weights beside it.
///
/// `workspace`: bytes of device memory that a layer may use for itself, 0 for TensorRT's default. float32 products are
/// computed in TF32 only if the variant says so.
///
/// Throws SessionError with TensorRT's message, or if the parser lost something that the result depends on, and
/// Interrupted if `progress` cancelled the build.
std::unique_ptr<nvinfer1::IHostMemory> build_engine(const std::filesystem::path& graph, const Variant& variant, const ModelInfo& model,
                                                    const BuildProgress& progress, std::int64_t workspace = 0);

} // namespace mars
