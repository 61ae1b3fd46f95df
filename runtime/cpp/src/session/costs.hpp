// runtime/session/cost_file.py: what a step costs in a session: learned, set by the user, or read from a file.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "bundle/bundle.hpp"
#include "decode/cost.hpp"

namespace mars {

/// The cache file for the cost of a variant's steps on this machine; its name is a hash of everything the cost depends
/// on. No value for a user without a home directory.
std::optional<std::filesystem::path> cost_file(const Bundle& bundle, const Variant& variant, const std::string& device,
                                               std::optional<int> threads, const std::map<std::string, std::string>& options = {});

/// Thread-safe.
class Costs {
  public:
    /// Begins with `curve` and what earlier sessions wrote to `file`.
    explicit Costs(Cost curve = built_in_cost("float32", true), std::optional<std::filesystem::path> file = std::nullopt);

    std::shared_ptr<const Cost> get();

    /// Learn from a step, and write what was learned now and then.
    void record(std::int64_t seqs, std::int64_t slots, double seconds);

    /// Use this cost instead, so that every run has the same numbers of masks.
    void set(Cost cost);

  private:
    const std::optional<std::filesystem::path> file_;
    std::mutex mutex_;
    LearnedCost learned_;
    std::shared_ptr<const Cost> fixed_;
};

} // namespace mars
