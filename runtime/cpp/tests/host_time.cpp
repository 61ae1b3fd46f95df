// What a decode step costs outside ONNX Runtime: mars-host-time BUNDLE THREADS TOKENS.
// Prints one line for each step of one answer at tau 1: microseconds outside ONNX Runtime's Run, and of the whole step.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include <mars/session.hpp>

#include "device/ort/backend.hpp"
#include "session/answers.hpp"

namespace {

constexpr int prompt_tokens = 128;

void run(const char* path, int threads, std::int64_t tokens) {
    mars::Bundle bundle = mars::open_bundle(path);
    auto backend = std::make_unique<mars::OrtBackend>(bundle, bundle.manifest.variants.front(), "cpu", mars::OrtSettings{threads});
    const mars::OrtBackend& watched = *backend;
    const mars::Session session = mars::Opened::over(std::move(bundle), std::move(backend));
    std::vector<std::int64_t> prompt;
    for (int i = 0; i < prompt_tokens; ++i) prompt.push_back(100 + i % 200);
    mars::GenerationConfig config;
    config.tau = 1.0;
    config.masks = mars::all_masks;
    config.max_new_tokens = tokens;
    config.eos_ids.emplace();
    mars::Stream stream = session.stream(prompt, config);
    stream.next(); // the prompt
    using Clock = std::chrono::steady_clock;
    for (bool is_over = false; !is_over;) {
        const double inside = watched.run_seconds();
        const Clock::time_point begun = Clock::now();
        const auto event = stream.next();
        const double whole = std::chrono::duration<double>(Clock::now() - begun).count();
        is_over = !event || event->finish_reason.has_value();
        if (event) std::printf("%.2f %.2f\n", 1e6 * (whole - (watched.run_seconds() - inside)), 1e6 * whole);
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fputs("usage: mars-host-time BUNDLE THREADS TOKENS\n", stderr);
        return 2;
    }
    try {
        run(argv[1], std::atoi(argv[2]), std::atoll(argv[3]));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "mars-host-time: %s\n", error.what());
        return 1;
    }
}
