// What a step costs in one session: measured once, set by the user, or read from the user's cache.
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
    explicit Costs(std::optional<std::filesystem::path> file = std::nullopt) : file_(std::move(file)) {}

    /// From the cache file, otherwise measured now (about a second) and written there, unless the machine is busy.
    std::shared_ptr<const Cost> get(Backend& backend, std::int64_t block, std::int64_t mask_id);

    /// Use this cost and measure nothing, so that every run has the same numbers of masks.
    void set(Cost cost);

  private:
    const std::optional<std::filesystem::path> file_;
    std::mutex mutex_;
    std::shared_ptr<const Cost> cost_;
};

} // namespace mars
