// mars-build-engine: builds the engine of a bundle's recipe on this machine and adds it to the bundle. No Python
// needed.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <sys/resource.h>
#include <unistd.h>

#include <mars/errors.hpp>

#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "bundle/recipe.hpp"
#include "bundle/sha256.hpp"
#include "device/trt/build.hpp"
#include "device/trt/cuda.hpp"
#include "device/trt/engine.hpp"
#include "joined.hpp"
#include "machine.hpp"

namespace {

namespace fs = std::filesystem;

constexpr const char* usage = R"(usage: mars-build-engine BUNDLE [OPTIONS]

Build the TensorRT engine of a bundle's recipe, on the machine it is for, and add it to the bundle.
`mars-export trt CHECKPOINT --target jetson-orin` writes the recipe, or with --no-build for any target.

      --recipe NAME   which one, if the bundle has several
      --force         replace an engine of that name; build even if memory looks too small
      --workspace MiB device memory that a layer may use for itself; TensorRT's default is most of it
      --dry-run       show what would be built, and build nothing
      --version, --help
)";

// Measured with TensorRT-RTX 1.7 on models of 135M to 1.5B parameters: about 3.1 times the weights, plus the process
// itself.
constexpr double memory_factor = 3.1, memory_base = 5e8;

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Arguments {
    fs::path bundle;
    std::string recipe;
    std::int64_t workspace = 0; // bytes
    bool force = false, dry_run = false, help = false, version = false;
};

std::int64_t mebibytes(const std::string& text) {
    if (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos || std::stoll(text) == 0)
        throw UsageError("--workspace needs a whole number of MiB, not `" + text + "`");
    return std::stoll(text) << 20;
}

Arguments parse(int argc, char** argv) {
    Arguments all;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--recipe" && i + 1 < argc)
            all.recipe = argv[++i];
        else if (word == "--workspace" && i + 1 < argc)
            all.workspace = mebibytes(argv[++i]);
        else if (word == "--force")
            all.force = true;
        else if (word == "--dry-run")
            all.dry_run = true;
        else if (word == "--help" || word == "-h")
            all.help = true;
        else if (word == "--version")
            all.version = true;
        else if (word.rfind('-', 0) == 0)
            throw UsageError("unknown option, or one without its value: " + word);
        else if (all.bundle.empty())
            all.bundle = word;
        else
            throw UsageError("only one bundle can be given, not also " + word + "");
    }
    if (all.bundle.empty() && !all.help && !all.version) throw UsageError("a bundle is expected");
    return all;
}

std::atomic<bool> is_interrupted{false};

/// The GPUs of the engine: those of the recipe, or the one in this machine, which must be among them.
std::vector<std::string> gpus_for(const mars::EngineRecipe& recipe) {
    const std::string known = mars::joined(recipe.compute_capabilities());
    if (recipe.backend() != mars::tensorrt_flavor())
        throw mars::SessionError("the recipe " + recipe.name() + " is for " + recipe.backend() + ", this program was built with " +
                                 mars::tensorrt_flavor());
    if (mars::builds_for_others()) return recipe.compute_capabilities();
    const auto gpu_or_reason = mars::find_gpu();
    const std::string needs = "full TensorRT builds on the GPU it is for (" + known + ")";
    if (const auto* none = std::get_if<std::string>(&gpu_or_reason)) throw mars::SessionError(needs + ", and " + *none);
    const mars::Gpu& gpu = std::get<mars::Gpu>(gpu_or_reason);
    for (const std::string& each : recipe.compute_capabilities())
        if (each == gpu.capability) return {each};
    throw mars::SessionError(needs + "; this machine has " + gpu.name + " (" + gpu.capability + ")");
}

void require_memory(std::int64_t weights, bool force) {
    const double needed = memory_factor * static_cast<double>(weights) + memory_base;
    const auto there = mars::available_memory();
    if (force || !there || needed <= static_cast<double>(*there)) return;
    char text[300];
    std::snprintf(text, sizeof text,
                  "building an engine from %.2f GB of weights takes about %.1f GB of memory and %.1f GB are available; close other "
                  "programs, add swap, or try anyway with --force",
                  static_cast<double>(weights) / 1e9, needed / 1e9, static_cast<double>(*there) / 1e9);
    throw mars::SessionError(text);
}

std::string whole_file(const fs::path& path) {
    const std::optional<std::string> text = mars::read_file(path);
    if (!text) throw mars::BundleError(path.string() + ": not readable; copy or export the bundle again");
    return *text;
}

/// The bundle's current manifest with the engine added; others may have changed it during the build.
std::string with_engine(const fs::path& bundle, const mars::EngineRecipe& recipe, const mars::BuiltBy& built, const mars::FileEntry& file) {
    return recipe.added_to(whole_file(bundle / "manifest.json"), built, file, "manifest.json");
}

void write(const fs::path& path, std::string_view content) {
    std::ofstream file(path, std::ios::binary);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    if (!file.flush()) throw fs::filesystem_error("cannot be written", path, std::make_error_code(std::errc::io_error));
}

/// Write the bundle with the engine to a sibling directory, then rename it.
void put(const fs::path& path, const mars::EngineRecipe& recipe, const mars::BuiltBy& built, std::string_view engine,
         const mars::FileEntry& file) {
    const std::string manifest = with_engine(path, recipe, built, file);
    const fs::path bundle = fs::canonical(path);
    const auto beside = [&](const char* end) { return bundle.parent_path() / ("." + bundle.filename().string() + end); };
    const fs::path next = beside(".partial"), before = beside(".replaced");
    try {
        fs::remove_all(next);
        fs::create_directory(next);
        for (const mars::FileEntry& each : mars::parse_manifest(manifest).files) {
            if (each.path == file.path) continue;
            std::error_code error;
            fs::create_hard_link(fs::canonical(bundle / each.path), next / each.path, error);
            if (error) fs::copy_file(bundle / each.path, next / each.path);
        }
        write(next / file.path, engine);
        write(next / "manifest.json", manifest);
        write(next / "manifest.sha256", mars::sha256(manifest) + "  manifest.json\n");
        fs::remove_all(before);
        fs::rename(bundle, before);
        fs::rename(next, bundle);
        fs::remove_all(before);
    } catch (const fs::filesystem_error& error) {
        std::error_code ignored;
        if (!fs::exists(bundle, ignored)) fs::rename(before, bundle, ignored);
        fs::remove_all(next, ignored);
        throw mars::BundleError(std::string(error.what()) + "; the bundle is unchanged");
    }
}

bool show(double share) {
    static int shown = -1;
    const int now = static_cast<int>(share * 100);
    if (now != shown && isatty(STDERR_FILENO) != 0) std::fprintf(stderr, "\rbuilding: %d %%", shown = now);
    return !is_interrupted;
}

void run(const Arguments& given) {
    const mars::Bundle bundle = mars::open_bundle(given.bundle);
    const mars::EngineRecipe recipe = mars::EngineRecipe::find(bundle, given.recipe, mars::tensorrt_flavor());
    if (!given.force)
        for (const mars::Variant& each : bundle.manifest.variants)
            if (each.name == recipe.name())
                throw mars::BundleError(bundle.path.string() + " has an engine `" + each.name + "` already; give --force to replace it");
    mars::BuiltBy built{mars::tensorrt_version(), mars::cuda_version(), mars::this_platform(), gpus_for(recipe), 0.0, 0};
    mars::FileEntry file{recipe.name() + ".engine", 0, std::string(64, '0')};
    const mars::Manifest planned = mars::parse_manifest(with_engine(bundle.path, recipe, built, file));
    const mars::Variant& variant = planned.variants.back();
    for (const mars::Range& range : variant.engine->ranges)
        std::cerr << variant.name << ", " << range.name << ": batch to " << range.batch.max << ", slots to " << range.slots.max
                  << ", predictions to " << range.outputs.max << ", capacity " << *variant.capacity << "\n";
    require_memory(recipe.weight_bytes(bundle), given.force);
    if (given.dry_run) {
        std::cout << "dry run: nothing was built\n";
        return;
    }
    const auto begun = std::chrono::steady_clock::now();
    const auto memory = mars::build_engine(bundle.path / variant.engine->graph, variant, bundle.manifest.model, show, given.workspace);
    if (isatty(STDERR_FILENO) != 0) std::cerr << "\n";
    built.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    rusage usage_now{};
    getrusage(RUSAGE_SELF, &usage_now);
    built.peak_memory = std::int64_t{usage_now.ru_maxrss} * 1024;
    const std::string_view engine(static_cast<const char*>(memory->data()), memory->size());
    file.size = static_cast<std::int64_t>(engine.size());
    file.sha256 = mars::sha256(engine);
    put(bundle.path, recipe, built, engine, file);
    std::cout << "built: " << file.path << ", " << file.size / 1000000 << " MB with " << recipe.backend() << " " << built.version << " in "
              << static_cast<std::int64_t>(built.seconds) << " s\n";
}

} // namespace

int main(int argc, char** argv) {
    try {
        const Arguments given = parse(argc, argv);
        if (given.help || given.version) {
            std::cout << (given.help ? usage : mars::tensorrt_flavor() + " " + mars::tensorrt_version() + "\n");
            return 0;
        }
        // Checked between two steps of the build, which cleans up. What is written afterwards is complete or absent.
        for (const int number : {SIGINT, SIGTERM}) std::signal(number, [](int) { is_interrupted = true; });
        run(given);
        return 0;
    } catch (const UsageError& error) {
        std::cerr << error.what() << "\n\n" << usage;
        return 2;
    } catch (const mars::Interrupted& error) {
        std::cerr << error.what() << "\n";
        return 130;
    } catch (const std::exception& error) {
        std::cerr << "Error: " << error.what() << "\n";
        return 1;
    }
}
