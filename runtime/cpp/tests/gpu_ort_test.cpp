// What only a GPU can show of ONNX Runtime's CUDA provider in libmars: the CPU's tokens in both KV layouts,
// and captured steps with the bits of eager ones.
// Exit code 77, with the reason: there is nothing to run it on.
//   MARS_GPU_BUNDLE      a bundle in fp32
//   MARS_GPU_REHEARSAL   anything: the same with the CPU as the device
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <tuple>

#include <mars/batcher.hpp>
#include <mars/session.hpp>

#include "device/ort/backend.hpp"
#include "device/ort/cuda_backend.hpp"
#include "session/answers.hpp"

namespace {

constexpr int skipped = 77;
constexpr const char* provider = "CUDAExecutionProvider";

struct Checks {
    int made = 0, wrong = 0;
    void check(bool holds, const char* what) {
        ++made;
        if (holds) return;
        ++wrong;
        std::cout << "wrong: " << what << "\n";
    }
};

/// The graph of a KV layout; the first one if there is none.
const mars::Variant& graph_of(const mars::Bundle& bundle, const std::string& layout) {
    const mars::Variant* found = nullptr;
    for (const mars::Variant& variant : bundle.manifest.variants)
        if (!variant.is_engine() && (found == nullptr || variant.kv_layout == layout)) found = &variant;
    if (found == nullptr) throw mars::SessionError("the bundle has no graph");
    return *found;
}

std::vector<std::int64_t> prompt_of(std::int64_t length, std::int64_t vocab) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < length; ++i) ids.push_back(31 * (i + length) % (vocab / 2));
    return ids;
}

void compare(const mars::Session& gpu, const mars::Session& cpu, Checks& checks) {
    const std::int64_t vocab = cpu.info().vocab_size;
    mars::GenerationConfig config;
    config.masks = mars::all_masks;
    config.max_new_tokens = 32;
    for (const double tau : {-1.0, 1.0, 0.7}) { // -1: exact
        if (tau > 0) config.tau = tau;
        for (const std::int64_t length : {1, 5, 40, 300}) {
            const auto expected = cpu.generate(prompt_of(length, vocab), config).token_ids;
            checks.check(gpu.generate(prompt_of(length, vocab), config).token_ids == expected, "an answer is not the CPU's");
            checks.check(gpu.generate(prompt_of(length, vocab), config).token_ids == expected, "its second time, from the prefix store");
        }
    }
    config.tau = 1.0;
    mars::Batcher service(gpu, {});
    std::vector<mars::Request> requests;
    for (std::int64_t i = 0; i < 12; ++i) requests.push_back(service.submit(prompt_of(3 + 11 * i, vocab), config));
    for (std::int64_t i = 0; i < 12; ++i)
        checks.check(requests[static_cast<std::size_t>(i)].result().token_ids ==
                         cpu.generate(prompt_of(3 + 11 * i, vocab), config).token_ids,
                     "an answer of a batch is not the CPU's");
    checks.check(gpu.generate(prompt_of(300, vocab), config).stats.cached_tokens > 0, "a prompt that came again was read again");
}

void print(mars::LogLevel, std::string_view words) { std::cout << words << "\n"; }

std::unique_ptr<mars::Backend> on_gpu(const mars::Bundle& bundle, const mars::Variant& graph, bool is_rehearsal, const char* captures) {
    if (is_rehearsal) return std::make_unique<mars::OrtBackend>(bundle, graph, "cpu", mars::OrtSettings{{}, {}, print});
    return std::make_unique<mars::CudaBackend>(bundle, graph, "cuda", mars::OrtSettings{{}, {{"enable_cuda_graph", captures}}, print});
}

/// Replayed steps must have the bits of the same graph's eager ones: 50 steps of other ids and lengths.
void compare_captured(mars::Backend& captured, mars::Backend& eager, std::int64_t vocab, Checks& checks) {
    const auto one = captured.new_cache(1), other = eager.new_cache(1);
    for (std::int64_t i = 0, length = 0; i < 50; ++i) {
        const std::int64_t slots = 1 + i % 7;
        mars::StepInput input{1, slots, 1, prompt_of(slots + i, vocab), {length}, {slots - 1}};
        input.input_ids.resize(static_cast<std::size_t>(slots));
        mars::StepOutput a, b;
        for (const auto& [backend, cache, output] : {std::tuple{&captured, one.get(), &a}, std::tuple{&eager, other.get(), &b}}) {
            cache->reserve(length + slots, {length});
            backend->step(*cache, 0, input, false, *output);
        }
        length += slots;
        checks.check(a.token_ids[0] == b.token_ids[0] && a.confidence[0] == b.confidence[0], "a captured step has the eager step's bits");
    }
}

int run(const char* path, bool is_rehearsal) {
    const mars::Bundle bundle = mars::open_bundle(path);
    Checks checks;
    const mars::Session cpu = mars::Opened::over(
        mars::open_bundle(path), std::make_unique<mars::OrtBackend>(bundle, graph_of(bundle, "in-place"), "cpu"), std::nullopt, 0);
    for (const char* layout : {"in-place", "cuda"}) {
        const mars::Variant& graph = graph_of(bundle, layout);
        const char* captures = graph.kv_layout == "cuda" ? "1" : "0"; // other graphs cannot be captured
        const mars::Session gpu =
            mars::Opened::over(mars::open_bundle(path), on_gpu(bundle, graph, is_rehearsal, captures), std::nullopt, 256 << 20);
        compare(gpu, cpu, checks);
        const auto captured = on_gpu(bundle, graph, is_rehearsal, captures), eager = on_gpu(bundle, graph, is_rehearsal, "0");
        compare_captured(*captured, *eager, cpu.info().vocab_size, checks);
        const auto* cuda = dynamic_cast<const mars::CudaBackend*>(captured.get());
        std::cout << graph.name << ": " << (cuda != nullptr ? cuda->num_graphs() : 0) << " captured\n";
    }
    std::cout << "ONNX Runtime " << mars::OrtBackend::version() << (is_rehearsal ? " on the CPU as a device: " : " on CUDA: ")
              << checks.made - checks.wrong << " of " << checks.made << " checks hold\n";
    return checks.wrong == 0 ? 0 : 1;
}

} // namespace

int main() {
    const auto devices = mars::OrtBackend::devices();
    const char* bundle = std::getenv("MARS_GPU_BUNDLE");
    const bool is_rehearsal = std::getenv("MARS_GPU_REHEARSAL") != nullptr;
    const std::string reason = !is_rehearsal && std::find(devices.begin(), devices.end(), provider) == devices.end()
                                   ? "this ONNX Runtime " + mars::OrtBackend::version() + " has no " + provider
                               : bundle == nullptr ? "MARS_GPU_BUNDLE names no bundle"
                                                   : "";
    if (!reason.empty()) {
        std::cout << "skipped: " << reason << "\n";
        return skipped;
    }
    try {
        return run(bundle, is_rehearsal);
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
