// A valid manifest, for tests that change it or run a fake model with it.
#pragma once

#include <exception>
#include <string>

#include <nlohmann/json.hpp>

inline nlohmann::json valid() {
    return nlohmann::json::parse(R"({
        "format_version": "1.0", "producer": "a test", "source": "nowhere", "revision": null, "block": 4,
        "model": {"type": "llama", "vocab_size": 20, "hidden_size": 8, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2,
                  "context_length": 64},
        "tokens": {"mask": 19, "eos": [1, 2], "pad": 0},
        "text": {"tokenizer": "tokenizer.json", "chat_template": null, "bos_token": null, "eos_token": "<e>"},
        "variants": [{"name": "onnx-fp32", "backend": "onnx", "file": "model.onnx", "weights": "weights.bin", "precision": "float32",
                      "kv_dtype": "float32", "kv_layout": "in-place", "outputs": ["token_ids", "confidence"], "batch": null, "slots": null,
                      "capacity": null, "drift": {"positions": 3, "argmax_matches": 3, "max_logit_error": 1e-5, "max_confidence_error": 0}}],
        "files": [{"path": "model.onnx", "size": 1, "sha256": "a"}, {"path": "weights.bin", "size": 1, "sha256": "b"},
                  {"path": "tokenizer.json", "size": 2, "sha256": "c"}],
        "profiles": [{"name": "p", "tau": 0.9, "metric": "margin", "variant": "onnx-fp32", "variant_sha256": "a", "evidence": {"n": 1}}],
        "something_newer": [1, 2]})");
}

/// Whether a message, such as what a broken one is refused with, has that part.
inline bool says(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

/// The message of what `body` throws, "" if it throws nothing.
template <typename Body>
std::string message_of(const Body& body) {
    try {
        body();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}
