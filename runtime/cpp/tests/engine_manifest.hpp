// A manifest with an engine in it, and the engine's file as tests/trt_stub reads it.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "bundle/bundle.hpp"
#include "machine.hpp"

/// What the engines of a test are built for; `fixed`: exactly `batch` rows of `block` slots.
struct EngineShape {
    std::int64_t batch = 3, block = 4, prefill = 16, capacity = 64, context = 64, top_k = 0;
    std::int64_t outputs = 0; // most of a step, `block` for 0
    bool fixed = false;
    std::string kv_layout = "in-place";
};

inline nlohmann::json extent(std::int64_t min, std::int64_t opt, std::int64_t max) { return {{"min", min}, {"opt", opt}, {"max", max}}; }

inline nlohmann::json ranges_of(const EngineShape& s) {
    if (s.fixed)
        return {{{"name", "decode"},
                 {"batch", extent(s.batch, s.batch, s.batch)},
                 {"slots", extent(s.block, s.block, s.block)},
                 {"outputs", extent(s.block, s.block, s.block)}}};
    const nlohmann::json outputs = extent(1, s.block, s.outputs > 0 ? s.outputs : s.block);
    return {
        {{"name", "decode"}, {"batch", extent(1, s.batch, s.batch)}, {"slots", extent(1, s.block, 2 * s.block - 1)}, {"outputs", outputs}},
        {{"name", "prefill"}, {"batch", extent(1, 1, s.batch)}, {"slots", extent(1, s.prefill, s.prefill)}, {"outputs", outputs}}};
}

/// A variant called `rtx`, of 2 layers with 2 heads of 4 float32 each.
inline nlohmann::json engine_variant(const EngineShape& s, const std::string& backend = "tensorrt_rtx") {
    nlohmann::json variant = {
        {"name", "rtx"},          {"backend", backend},    {"file", "rtx.engine"},     {"weights", nullptr},
        {"precision", "float32"}, {"kv_dtype", "float32"}, {"kv_layout", s.kv_layout}, {"outputs", {"token_ids", "confidence"}},
        {"batch", nullptr},       {"slots", nullptr},      {"capacity", s.capacity}};
    if (s.top_k > 0) variant["outputs"] = {"token_ids", "confidence", "topk_ids", "topk_logprobs"};
    if (s.fixed) {
        variant["batch"] = s.batch;
        variant["slots"] = s.block;
    }
    variant["engine"] = {{"version", "10.16.0.72"},
                         {"cuda", "12"},
                         {"platform", mars::this_platform()},
                         {"compute_capabilities", {"sm86", "sm89"}},
                         {"ranges", ranges_of(s)},
                         {"graph", "rtx.onnx"},
                         {"graph_sha256", "0"},
                         {"seconds", 1.5},
                         {"peak_memory", 1}};
    return variant;
}

/// A whole manifest whose files are not on disk.
inline nlohmann::json engine_manifest(const EngineShape& s, const std::string& backend = "tensorrt_rtx") {
    return {{"format_version", "1.0"},
            {"producer", "a test"},
            {"source", "nowhere"},
            {"block", s.block},
            {"model",
             {{"type", "llama"},
              {"vocab_size", 1000},
              {"hidden_size", 8},
              {"num_layers", 2},
              {"num_heads", 2},
              {"num_kv_heads", 2},
              {"head_dim", 4},
              {"context_length", s.context}}},
            {"tokens", {{"mask", 0}, {"eos", nlohmann::json::array()}, {"pad", 0}}},
            {"text", nullptr},
            {"variants", {engine_variant(s, backend)}},
            {"files",
             {{{"path", "rtx.engine"}, {"size", 1}, {"sha256", "0123456789abcdef"}}, {{"path", "rtx.onnx"}, {"size", 1}, {"sha256", "0"}}}},
            {"profiles", nlohmann::json::array()}};
}

inline std::string stub_engine(const EngineShape& s) {
    return nlohmann::json{
        {"layers", 2},     {"kv_heads", 2}, {"head_dim", 4}, {"in_place", s.kv_layout == "in-place"}, {"ranges", ranges_of(s)},
        {"top_k", s.top_k}}
        .dump();
}
