// A graph in ONNX Runtime: which provider computes it, with which options, and which of its operators the provider leaves to the CPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <mars/config.hpp>

#include "device/ort_api.hpp"
#include "device/ort_options.hpp"

namespace mars {

constexpr const char* cpu_provider = "CPUExecutionProvider";

/// The provider of a kind of device, as DeviceName has it; throws SessionError that lists those there are.
std::string provider_of(const std::string& device);

/// Make sessions compute with `provider`, with options of its own. Throws Ort::Exception.
void add_provider(Ort::SessionOptions& options, const std::string& provider, const OrtOptions& own);

/// What is opened, and how. `place` is where `provider` reads it.
struct OrtRequest {
    std::filesystem::path place;
    std::string provider;
    OrtParts options;
    std::optional<int> threads;
    std::int64_t accuracy_level = 0;
    OnLog on_log;
    bool arena = true; // on the CPU: memory of a step is kept for the next
};

/// Whether ONNX Runtime has had an environment in this process: what that takes stays.
bool has_begun();

/// Throws Ort::Exception.
std::shared_ptr<OrtGraph> open_graph(const OrtRequest& request);

/// Operator -> how many nodes of a graph the CPU computes beside its provider. Nothing where this library was built with headers of ONNX
/// Runtime before 1.24, which has no such question.
std::optional<std::map<std::string, int>> on_cpu(const OrtGraph& graph, const std::string& provider);

/// A sentence for the log about operators that carry a step's work and are left to the CPU; nothing where there are none.
std::optional<std::string> heavy_on_cpu(const std::map<std::string, int>& on_cpu, const std::string& provider);

} // namespace mars
