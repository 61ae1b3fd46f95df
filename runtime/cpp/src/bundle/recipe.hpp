// Recipes of `mars-export trt` for engines that are built on another machine: the engine's manifest entry without what
// the build adds.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "bundle/bundle.hpp"

namespace mars {

/// What the building machine adds to an engine's entry. `cuda`: the major version; `seconds`: build time; `peak_memory`
/// in bytes.
struct BuiltBy {
    std::string version, cuda, platform;
    std::vector<std::string> compute_capabilities;
    double seconds = 0.0;
    std::int64_t peak_memory = 0;
};

/// An engine to build for a bundle.
class EngineRecipe {
  public:
    /// The recipe called `name`, or if that is empty the only one for `backend`. Throws BundleError that lists the
    /// existing ones.
    static EngineRecipe find(const Bundle& bundle, const std::string& name, const std::string& backend);

    const std::string& name() const { return name_; }
    const std::string& backend() const { return backend_; }
    const std::vector<std::string>& compute_capabilities() const { return capabilities_; }

    /// Bytes of the graph's weight file.
    std::int64_t weight_bytes(const Bundle& bundle) const;

    /// The manifest's text with the engine added, replacing one of the same name; `file` is the engine's. Throws
    /// BundleError if the result is not a valid manifest, or if the graph is not the one the recipe was written for.
    std::string added_to(const std::string& manifest, const BuiltBy& built, const FileEntry& file, const std::string& where) const;

  private:
    std::string name_, backend_, weights_;
    std::vector<std::string> capabilities_;
    nlohmann::json entry_;
};

} // namespace mars
