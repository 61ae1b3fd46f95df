// The manifest's description of a TensorRT engine: its build, its GPUs and shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mars {

/// The values that one dimension may have, and the one the engine was optimized for.
struct Extent {
    std::int64_t min = 1, opt = 1, max = 1;

    bool holds(std::int64_t value) const { return min <= value && value <= max; }
};

/// Shapes that an engine accepts: one TensorRT optimization profile (a `Profile` here is a calibrated tau).
struct Range {
    std::string name;
    Extent batch, slots, outputs;
};

/// How an engine was built.
///
/// `version`: TensorRT's. `cuda`: the CUDA major version of its libraries. `platform` such as `linux-x86_64`.
/// `compute_capabilities`: the GPUs it runs on, such as `sm86`. `ranges` in the order of its optimization profiles.
/// `graph`: the bundle's ONNX file it was built from.
struct EngineInfo {
    std::string version, cuda, platform;
    std::vector<std::string> compute_capabilities;
    std::vector<Range> ranges;
    std::string graph;

    /// Index of the first range that accepts this shape, or no value.
    std::optional<std::size_t> range_for(std::int64_t rows, std::int64_t slots, std::int64_t outputs) const;

    std::int64_t max_rows() const { return largest(&Range::batch); }
    std::int64_t max_slots() const { return largest(&Range::slots); }
    std::int64_t max_outputs() const { return largest(&Range::outputs); }

  private:
    std::int64_t largest(Extent Range::* dimension) const;
};

/// Operating system and processor of this machine, such as `linux-x86_64`.
std::string this_platform();

} // namespace mars
