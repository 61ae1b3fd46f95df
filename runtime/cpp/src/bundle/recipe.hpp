// What `mars-export trt` wrote down of an engine that is built elsewhere: its entry in the manifest, but for what the build adds. Knows no
// TensorRT.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "bundle/bundle.hpp"

namespace mars {

/// What the machine that builds adds to an engine's entry. `cuda`: the major version; `seconds` of the build, `peak_memory` in bytes.
struct BuiltBy {
    std::string version, cuda, platform;
    std::vector<std::string> compute_capabilities;
    double seconds = 0.0;
    std::int64_t peak_memory = 0;
};

/// An engine to build for a bundle.
class EngineRecipe {
  public:
    /// The recipe called `name`, or the only one for `backend` where it is empty. Throws BundleError that lists those there are.
    static EngineRecipe find(const Bundle& bundle, const std::string& name, const std::string& backend);

    const std::string& name() const { return name_; }
    const std::string& backend() const { return backend_; }
    const std::vector<std::string>& compute_capabilities() const { return capabilities_; }

    /// Bytes of the file that the graph takes its weights from.
    std::int64_t weight_bytes(const Bundle& bundle) const;

    /// A manifest's text with the engine in it, in the place of one of its name; `file` is the engine's. Throws BundleError where the result
    /// is no manifest, or the graph is not the one that the recipe was written for.
    std::string added_to(const std::string& manifest, const BuiltBy& built, const FileEntry& file, const std::string& where) const;

  private:
    std::string name_, backend_, weights_;
    std::vector<std::string> capabilities_;
    nlohmann::json entry_;
};

} // namespace mars
