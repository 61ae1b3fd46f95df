// With the builder and ONNX parser of TensorRT 10.3 or newer, or of TensorRT-RTX.
#include "device/trt/build.hpp"

#include <NvOnnxParser.h>
#include <algorithm>
#include <cuda_runtime_api.h>
#include <map>
#include <vector>

#include <mars/errors.hpp>

#include "device/trt/engine.hpp"
#include "device/trt/engine_log.hpp"
#include "joined.hpp"

// TensorRT can write KV entries in place, and has attention as a layer, since 10.15; all supported versions of
// TensorRT-RTX do.
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR > 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 15)
#define MARS_TRT_IN_PLACE 1
#endif

namespace mars {

namespace {

constexpr std::size_t longest_list = 8; // of names or reasons in one message

using Shape = std::vector<std::int64_t>;

struct Shapes {
    Shape least, best, most;
};

/// Shapes of every input of the step graph in one range (exporter/tensorrt/plan.py).
std::map<std::string, Shapes> inputs_of(const Range& range, const ModelInfo& model, std::int64_t capacity) {
    std::map<std::string, Shapes> all;
    const auto add = [&](const std::string& name, const std::function<Shape(std::int64_t Extent::*)>& at) {
        all[name] = {at(&Extent::min), at(&Extent::opt), at(&Extent::max)};
    };
    add("input_ids", [&](auto which) { return Shape{range.batch.*which, range.slots.*which}; });
    add("kv_length", [&](auto which) { return Shape{range.batch.*which}; });
    add("output_index", [&](auto which) { return Shape{range.batch.*which, range.outputs.*which}; });
    for (std::int64_t i = 0; i < model.num_layers; ++i)
        for (const char* kind : {".key", ".value"})
            add("past_key_values." + std::to_string(i) + kind,
                [&](auto which) { return Shape{range.batch.*which, model.num_kv_heads, capacity, model.head_dim}; });
    return all;
}

[[noreturn]] void wrong(const std::string& what) { throw SessionError(tensorrt_flavor() + " " + tensorrt_version() + " " + what); }

/// Reports TensorRT's nested phases as one number. TensorRT calls it in the building thread.
class Monitor : public nvinfer1::IProgressMonitor {
  public:
    explicit Monitor(const BuildProgress& progress) : progress_(progress) {}

    void phaseStart(const char* phase, const char*, std::int32_t num_steps) noexcept override {
        phases_.push_back({phase, 0, std::max(num_steps, std::int32_t{1})});
    }

    bool stepComplete(const char* phase, std::int32_t step) noexcept override {
        double share = 1.0, position = 0.0;
        for (Phase& each : phases_) {
            if (each.name == phase) each.done = step + 1;
            position += share * std::min(static_cast<double>(each.done) / each.total, 1.0);
            share /= each.total;
        }
        // Phases open and close in an order of TensorRT's own; never report less progress than before.
        shown_ = std::max(shown_, std::min(position, 1.0));
        is_ended = is_ended || !progress_(shown_);
        return !is_ended;
    }

    void phaseFinish(const char* phase) noexcept override {
        const auto same = [&](const Phase& each) { return each.name == phase; };
        phases_.erase(std::remove_if(phases_.begin(), phases_.end(), same), phases_.end());
    }

    bool is_ended = false;

  private:
    struct Phase {
        std::string name;
        std::int32_t done, total;
    };

    const BuildProgress& progress_;
    std::vector<Phase> phases_; // open ones, outermost first
    double shown_ = 0.0;
};

/// Throw unless the parser kept everything that the result depends on; make fp32 attention buildable.
///
/// TensorRT's parser has silently dropped inputs of Attention: a network without masks builds and computes nonsense.
void check(nvinfer1::INetworkDefinition& network, const Variant& variant, const ModelInfo& model) {
    std::vector<std::string> problems;
    if (variant.kv_layout == "static") {
#ifdef MARS_TRT_IN_PLACE
        std::int64_t updates = 0, attentions = 0, unmasked = 0;
        for (std::int32_t i = 0; i < network.getNbLayers(); ++i) {
            nvinfer1::ILayer& layer = *network.getLayer(i);
            updates += layer.getType() == nvinfer1::LayerType::kKVCACHE_UPDATE ? 1 : 0;
            if (layer.getType() != nvinfer1::LayerType::kATTENTION_INPUT) continue;
            nvinfer1::IAttention* attention = static_cast<nvinfer1::IAttentionInputLayer&>(layer).getAttention();
            ++attentions;
            unmasked += attention->getMask() == nullptr ? 1 : 0;
            // No fused kernel exists for fp32: let TensorRT decompose the operator.
            attention->setDecomposable(variant.kv_dtype == "float32");
        }
        if (updates != 2 * model.num_layers)
            problems.push_back(std::to_string(updates) + " in-place KV writes instead of " + std::to_string(2 * model.num_layers));
        if (attentions != model.num_layers)
            problems.push_back(std::to_string(attentions) + " attentions instead of " + std::to_string(model.num_layers));
        if (unmasked > 0) problems.push_back(std::to_string(unmasked) + " attentions lost their mask");
#else
        wrong("cannot write KV entries in place; make the recipe again with --kv-layout delta");
#endif
    }
    std::map<std::string, Shapes> due = inputs_of(variant.engine->ranges.front(), model, *variant.capacity);
    std::vector<std::string> odd;
    for (std::int32_t i = 0; i < network.getNbInputs(); ++i)
        if (const char* name = network.getInput(i)->getName(); due.erase(name) == 0) odd.emplace_back(name);
    for (const auto& missing : due) odd.push_back(missing.first);
    odd.resize(std::min(odd.size(), longest_list));
    if (!odd.empty()) problems.push_back("inputs differ: " + joined(odd));
    if (!problems.empty()) wrong("read the graph wrongly, so no engine was built: " + joined(problems, "; "));
}

void add_ranges(nvinfer1::IBuilder& builder, nvinfer1::IBuilderConfig& config, const Variant& variant, const ModelInfo& model,
                const Collected& logger) {
    for (const Range& range : variant.engine->ranges) {
        nvinfer1::IOptimizationProfile& profile = *builder.createOptimizationProfile();
        bool good = true;
        for (const auto& [name, shapes] : inputs_of(range, model, *variant.capacity)) {
            good = good && profile.setDimensions(name.c_str(), nvinfer1::OptProfileSelector::kMIN, dims_of(shapes.least));
            good = good && profile.setDimensions(name.c_str(), nvinfer1::OptProfileSelector::kOPT, dims_of(shapes.best));
            good = good && profile.setDimensions(name.c_str(), nvinfer1::OptProfileSelector::kMAX, dims_of(shapes.most));
        }
        if (!good || config.addOptimizationProfile(&profile) < 0) wrong("refuses the range " + range.name + ": " + logger.last(1));
    }
}

/// Set the GPUs that RTX compiles for, and forbid allocations in steps, which could not be captured in CUDA graphs.
void prepare([[maybe_unused]] nvinfer1::IBuilderConfig& config, [[maybe_unused]] const EngineInfo& info) {
#ifdef TRT_MAJOR_RTX
    using Capability = nvinfer1::ComputeCapability;
    const std::map<std::string, Capability> known{{"sm75", Capability::kSM75},   {"sm80", Capability::kSM80},
                                                  {"sm86", Capability::kSM86},   {"sm89", Capability::kSM89},
                                                  {"sm120", Capability::kSM120}, {"sm121", Capability::kSM121}};
    bool good = config.setNbComputeCapabilities(static_cast<std::int32_t>(info.compute_capabilities.size()));
    for (std::size_t i = 0; i < info.compute_capabilities.size(); ++i) {
        const auto at = known.find(info.compute_capabilities[i]);
        good = good && at != known.end() && config.setComputeCapability(at->second, static_cast<std::int32_t>(i));
        if (!good) wrong("cannot build for " + info.compute_capabilities[i] + "; leave it out or use another version");
    }
    config.setFlag(nvinfer1::BuilderFlag::kREQUIRE_USER_ALLOCATION);
#endif
}

} // namespace

std::string cuda_version() { return std::to_string(CUDART_VERSION / 1000); }

bool builds_for_others() {
#ifdef TRT_MAJOR_RTX
    return true;
#else
    return false;
#endif
}

std::unique_ptr<nvinfer1::IHostMemory> build_engine(const std::filesystem::path& graph, const Variant& variant, const ModelInfo& model,
                                                    const BuildProgress& progress, std::int64_t workspace) {
    Collected logger; // must outlive what reports to it
    const std::unique_ptr<nvinfer1::IBuilder> builder(nvinfer1::createInferBuilder(logger));
    if (!builder) wrong("does not start: " + logger.last(longest_list));
    // The graph determines the precision. TensorRT 11 supports nothing else and has no flag for it.
#if !defined(TRT_MAJOR_RTX) && NV_TENSORRT_MAJOR >= 11
    const std::uint32_t flags = 0;
#else
    const std::uint32_t flags = 1U << static_cast<std::uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
#endif
    const std::unique_ptr<nvinfer1::INetworkDefinition> network(builder->createNetworkV2(flags));
    if (!network) wrong("cannot make a network: " + logger.last(longest_list));
    const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, logger));
    if (!parser) wrong("has no parser: " + logger.last(longest_list));
    if (!parser->parseFromFile(graph.c_str(), static_cast<int>(nvinfer1::ILogger::Severity::kERROR))) {
        std::string lines;
        for (int i = 0; i < std::min(parser->getNbErrors(), static_cast<int>(longest_list)); ++i) {
            const nvonnxparser::IParserError& error = *parser->getError(i);
            lines += std::string("\n  ") + error.nodeOperator() + " " + error.nodeName() + ": " + error.desc();
        }
        wrong("cannot read " + graph.filename().string() + ":" + (lines.empty() ? "\n  " + logger.last(longest_list) : lines));
    }
    check(*network, variant, model);
    const std::unique_ptr<nvinfer1::IBuilderConfig> config(builder->createBuilderConfig());
    if (!config) wrong("cannot be configured: " + logger.last(longest_list));
    add_ranges(*builder, *config, variant, model, logger);
    prepare(*config, *variant.engine);
    // TF32, the default, computes float32 products with fewer bits; confidences would differ from other devices.
    if (!variant.engine->tf32) config->clearFlag(nvinfer1::BuilderFlag::kTF32);
    if (workspace > 0) config->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, static_cast<std::size_t>(workspace));
    Monitor monitor(progress);
    config->setProgressMonitor(&monitor);
    std::unique_ptr<nvinfer1::IHostMemory> engine(builder->buildSerializedNetwork(*network, *config));
    if (monitor.is_ended) throw Interrupted("the build was ended; the bundle is unchanged");
    if (!engine) wrong("cannot build " + graph.filename().string() + ": " + logger.last(longest_list));
    return engine;
}

} // namespace mars
