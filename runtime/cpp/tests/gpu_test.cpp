// What only a GPU can show: an engine's tokens are ONNX Runtime's. Exit code 77, with the reason: there is nothing to run it on.
//   MARS_GPU_BUNDLE   a bundle in fp32 with an engine for this GPU and a graph for the CPU
#include <cstdlib>
#include <iostream>

#include <mars/session.hpp>

#include "device/engines.hpp"

namespace {

constexpr int skipped = 77;

int compare(const mars::Session& gpu, const mars::Session& cpu) {
    const std::int64_t vocab = cpu.info().vocab_size;
    int wrong = 0, compared = 0;
    for (const double tau : {1.0, 0.7, 0.3})
        for (const std::size_t length : {1U, 5U, 40U}) {
            std::vector<std::int64_t> prompt(length);
            for (std::size_t i = 0; i < length; ++i) prompt[i] = static_cast<std::int64_t>(31 * (i + length)) % (vocab / 2);
            mars::GenerationConfig config;
            config.tau = tau;
            config.masks = mars::all_masks;
            config.max_new_tokens = 32;
            const auto expected = cpu.generate(prompt, config).token_ids;
            for (int i = 0; i < 3; ++i, ++compared) // the third time with captured steps
                wrong += gpu.generate(prompt, config).token_ids != expected;
        }
    std::cout << compared - wrong << " of " << compared << " answers equal\n";
    return wrong == 0 ? 0 : 1;
}

} // namespace

int main() {
    const mars::Here here = mars::look_around();
    const char* bundle = std::getenv("MARS_GPU_BUNDLE");
    const std::string reason = here.tensorrt.empty()  ? "no library for TensorRT: " + here.missing.at("tensorrt")
                               : !here.no_gpu.empty() ? here.no_gpu
                               : bundle == nullptr    ? "MARS_GPU_BUNDLE names no bundle with an engine"
                                                      : "";
    if (!reason.empty()) {
        std::cout << "skipped: " << reason << "\n";
        return skipped;
    }
    try {
        return compare(mars::Session::open(bundle, {"cuda"}), mars::Session::open(bundle));
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
