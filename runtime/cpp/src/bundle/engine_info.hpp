// What a manifest says about a TensorRT engine: what built it, for which GPUs and shapes. Knows no TensorRT.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mars {

/// What one dimension may be, and what the engine is fastest at.
struct Extent {
    std::int64_t min = 1, opt = 1, max = 1;

    bool holds(std::int64_t value) const { return min <= value && value <= max; }
};

/// Shapes that an engine takes: one TensorRT optimization profile (a `Profile` here is a calibrated tau).
struct Range {
    std::string name;
    Extent batch, slots, outputs;
};

/// How an engine came about.
///
/// `version`: TensorRT's; `cuda`: the CUDA major version its libraries are for; `platform` such as `linux-x86_64`;
/// `compute_capabilities`: the GPUs it runs on, such as `sm86`; `ranges` in the order of its optimization profiles; `graph`: the
/// bundle's ONNX file it was built from; `tf32`: products of float32 may be computed in TF32.
struct EngineInfo {
    std::string version, cuda, platform;
    std::vector<std::string> compute_capabilities;
    std::vector<Range> ranges;
    std::string graph;
    bool tf32 = false;

    /// Index of the first range that takes this shape, nothing if there is none.
    std::optional<std::size_t> range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const;

    std::int64_t max_rows() const;
    std::int64_t max_slots() const;
    std::int64_t max_outputs() const;
};

/// The operating system and processor of this machine, such as `linux-x86_64`.
std::string this_platform();

} // namespace mars
