// What a step costs in one session: measured when it is first asked for, told, or kept by an earlier session of this user.
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

/// The file of what a step of a variant costs on this machine, named after everything that depends on. Nothing for a user without a home.
std::optional<std::filesystem::path> cost_file(const Bundle& bundle, const Variant& variant, const std::string& device,
                                               std::optional<int> threads, const std::map<std::string, std::string>& options = {});

/// Any thread may ask.
class Costs {
  public:
    explicit Costs(std::optional<std::filesystem::path> file = std::nullopt) : file_(std::move(file)) {}

    /// As an earlier session wrote it down, else measured now, which takes about a second; written down then, unless the machine is busy.
    std::shared_ptr<const Cost> get(Backend& backend, std::int64_t block, std::int64_t mask_id);

    /// Take this, and measure nothing: the same windows in every run.
    void set(Cost cost);

  private:
    const std::optional<std::filesystem::path> file_;
    std::mutex mutex_;
    std::shared_ptr<const Cost> cost_;
};

} // namespace mars
