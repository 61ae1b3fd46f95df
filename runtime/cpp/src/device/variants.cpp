#include "device/variants.hpp"

#include <algorithm>
#include <sstream>
#include <vector>

#include <mars/errors.hpp>

#include "device/name.hpp"
#include "device/ort/backend.hpp"
#include "joined.hpp"

namespace mars {

namespace {

/// Whether two versions agree in the numbers that both have. Python's package says 10.3.0 or 10.7.0.post1 where the
/// library says 10.3.0.30. TensorRT itself judges anything after the patch level when it loads the engine.
bool is_same_version(const std::string& one, const std::string& other) {
    const auto numbers = [](const std::string& version) {
        std::vector<std::string> all;
        std::istringstream parts(version);
        for (std::string part; std::getline(parts, part, '.') && part.find_first_not_of("0123456789") == std::string::npos;)
            all.push_back(part);
        return all;
    };
    const std::vector<std::string> a = numbers(one), b = numbers(other);
    const std::size_t common = std::min(a.size(), b.size());
    return common > 0 ? std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(common), b.begin()) : one == other;
}

std::vector<std::string> engine_mismatches(const Variant& variant, const Here& here) {
    if (!variant.engine || !variant.capacity)
        return {"the manifest does not say what it was built for; build it again with `mars-export trt`"};
    const EngineInfo& info = *variant.engine;
    std::vector<std::string> reasons;
    if (info.platform != here.platform) reasons.push_back("built on " + info.platform + ", this is " + here.platform + "; build it here");
    const std::string built = "built with " + variant.backend + " " + info.version + ", ";
    const auto runs = here.tensorrt.find(variant.backend);
    if (runs == here.tensorrt.end()) {
        const auto why = here.missing.find(variant.backend);
        reasons.push_back(built + "and libmars_" + variant.backend + ".so is not here (" +
                          (why != here.missing.end() ? why->second : "not looked for") +
                          "); build libmars with -DMARS_TENSORRT=ON and that TensorRT (docs/cpp.md)");
        if (here.tensorrt.empty()) return reasons; // without a plugin nothing is known about the GPU
    } else if (!is_same_version(runs->second, info.version)) {
        reasons.push_back(built + "this libmars runs with " + runs->second + "; build the engine again or install " + info.version);
    }
    if (!here.no_gpu.empty()) return reasons.push_back(here.no_gpu), reasons;
    const auto& known = info.compute_capabilities;
    if (std::none_of(known.begin(), known.end(), [&](const auto& gpu) { return gpu == here.gpu || gpu == "portable"; }))
        reasons.push_back("built for " + joined(known, ", ") + ", this GPU is a " + here.gpu_name + " (" + here.gpu +
                          "); build it with --target host");
    const bool has_major = !info.cuda.empty() && info.cuda.size() < 5 && info.cuda.find_first_not_of("0123456789") == std::string::npos;
    if (has_major && !here.driver.empty() && std::stoi(here.driver) < std::stoi(info.cuda))
        reasons.push_back("its libraries are for CUDA " + info.cuda + ", this driver supports CUDA " + here.driver + "; update the driver");
    return reasons;
}

std::string other(const Variant& variant, const std::string& device) {
    if (const auto reason = why_not(variant, device, nullptr)) return *reason;
    return "a graph for ONNX Runtime; name it as the variant to run it all the same";
}

} // namespace

bool runs_engines(const std::string& device) { return DeviceName::of(device).kind == "cuda"; }

std::optional<std::string> why_not(const Variant& variant, const std::string& device, const Here* here) {
    if (!variant.is_engine()) {
        if (variant.is_static()) return "its fixed shapes are for compilers; the session runs the dynamic graph";
        const bool is_on_cpu = DeviceName::of(device).kind == "cpu";
        if (variant.kv_dtype == "int8" && !is_on_cpu) return "its int8 KV entries are for CPUs; export with --kv float";
        if (variant.kv_layout == "appended" && !is_on_cpu) return "its KV layout is for TensorRT; export with --kv-layout in-place";
        if (variant.kv_layout == "cuda" && !is_at_least(OrtBackend::version(), 28))
            return "its attention needs ONNX Runtime 1.28 or newer, " + OrtBackend::version() + " is installed";
        return std::nullopt;
    }
    if (!runs_engines(device)) return "made for " + variant.backend + ": an engine runs on a GPU; give the device cuda";
    if (here == nullptr) return std::nullopt;
    const std::vector<std::string> reasons = engine_mismatches(variant, *here);
    return reasons.empty() ? std::nullopt : std::optional(joined(reasons, "; "));
}

const Variant& choose(const Bundle& bundle, const std::string& device, const Here* here) {
    const bool on_gpu = runs_engines(device);
    std::vector<const Variant*> variants;
    for (const Variant& variant : bundle.manifest.variants) variants.push_back(&variant);
    std::stable_partition(variants.begin(), variants.end(), [](const Variant* v) { return v->kv_layout == "cuda"; });
    const bool engines = on_gpu && std::any_of(variants.begin(), variants.end(), [](const Variant* v) { return v->is_engine(); });
    std::optional<Here> machine;
    if (engines && here == nullptr) here = &machine.emplace(look_around(DeviceName::of(device).ordinal()));
    std::string wanted, others;
    for (const Variant* variant : variants) {
        const bool is_wanted = variant->is_engine() == engines && (on_gpu || variant->kv_layout != "cuda");
        const auto reason = is_wanted ? why_not(*variant, device, here) : other(*variant, device);
        if (!reason) return *variant;
        (is_wanted ? wanted : others) += "\n  " + variant->name + ": " + *reason;
    }
    throw SessionError(bundle.path.string() + ": no variant runs here on " + device.substr(0, 60) + ":" + wanted + others);
}

const Variant& choose_named(const Bundle& bundle, const std::string& name, const std::string& device, const Here* here) {
    const Variant& variant = bundle.variant(name);
    std::optional<Here> machine;
    if (here == nullptr && variant.is_engine() && runs_engines(device))
        here = &machine.emplace(look_around(DeviceName::of(device).ordinal()));
    if (const auto reason = why_not(variant, device, here))
        throw SessionError(bundle.path.string() + ": variant " + variant.name + " does not run in this session: " + *reason);
    return variant;
}

} // namespace mars
