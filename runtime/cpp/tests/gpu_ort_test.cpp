// What only a GPU can show of ONNX Runtime's CUDA provider in libmars: the CPU's tokens, with KV rows in the GPU's memory.
// Exit code 77, with the reason: there is nothing to run it on.
//   MARS_GPU_BUNDLE      a bundle in fp32 with a graph
//   MARS_GPU_REHEARSAL   anything: the same with the CPU as the device
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>

#include <mars/batcher.hpp>
#include <mars/session.hpp>

#include "device/ort/backend.hpp"
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

const mars::Variant& graph_of(const mars::Bundle& bundle) {
    for (const mars::Variant& variant : bundle.manifest.variants)
        if (!variant.is_engine()) return variant;
    throw mars::SessionError("the bundle has no graph");
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

int run(const char* path, bool is_rehearsal) {
    const mars::Bundle bundle = mars::open_bundle(path);
    auto backend =
        std::make_unique<mars::OrtBackend>(bundle, graph_of(bundle), is_rehearsal ? "cpu" : "cuda", mars::OrtSettings{{}, {}, print});
    Checks checks;
    const mars::Session cpu =
        mars::Opened::over(mars::open_bundle(path), std::make_unique<mars::OrtBackend>(bundle, graph_of(bundle), "cpu"), std::nullopt, 0);
    const mars::Session gpu = mars::Opened::over(mars::open_bundle(path), std::move(backend), std::nullopt, 256 << 20);
    compare(gpu, cpu, checks);
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
