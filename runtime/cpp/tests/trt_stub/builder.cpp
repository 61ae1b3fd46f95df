// A builder whose engines are those of engine.cpp, and a parser that takes what a graph holds from the variable MARS_STUB. They refuse what
// the real ones do.
#include <NvInfer.h>
#include <NvOnnxParser.h>
#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <tuple>

#include <nlohmann/json.hpp>

#include "stub.hpp"

namespace {

using Json = nlohmann::json;
using stub::state;
using Severity = nvinfer1::ILogger::Severity;

constexpr int onnx_float = 1, onnx_half = 10, onnx_bf16 = 16; // as ONNX numbers them
constexpr std::size_t num_selectors = 3;

bool is_before_in_place() {
#ifdef TRT_MAJOR_RTX
    return false;
#else
    return state().version < std::vector<int>{10, 15};
#endif
}

struct Tensor : nvinfer1::ITensor {
    explicit Tensor(const Json& input) : name(input.at("name")), type(input.value("type", 0)), shape(input.value("shape", stub::Shape())) {}
    const char* getName() const noexcept override { return name.c_str(); }

    std::string name;
    int type;
    stub::Shape shape; // -1: symbolic
};

struct Layer : nvinfer1::ILayer {
    explicit Layer(nvinfer1::LayerType is) : type(is) {}
    nvinfer1::LayerType getType() const noexcept override { return type; }

    nvinfer1::LayerType type;
};

struct Attention : nvinfer1::IAttentionInputLayer, nvinfer1::IAttention {
    nvinfer1::LayerType getType() const noexcept override { return nvinfer1::LayerType::kATTENTION_INPUT; }
    nvinfer1::IAttention* getAttention() const noexcept override { return const_cast<Attention*>(this); }
    nvinfer1::ITensor* getMask() noexcept override { return mask.get(); }
    bool setDecomposable(bool yes) noexcept override { return decomposable = yes, true; }

    std::unique_ptr<nvinfer1::ITensor> mask;
    bool decomposable = false;
};

struct Network : nvinfer1::INetworkDefinition {
    std::int32_t getNbLayers() const noexcept override { return static_cast<std::int32_t>(layers.size()); }
    nvinfer1::ILayer* getLayer(std::int32_t index) const noexcept override { return layers[static_cast<std::size_t>(index)].get(); }
    std::int32_t getNbInputs() const noexcept override { return static_cast<std::int32_t>(inputs.size()); }
    nvinfer1::ITensor* getInput(std::int32_t index) const noexcept override { return inputs[static_cast<std::size_t>(index)].get(); }

    std::vector<std::unique_ptr<nvinfer1::ILayer>> layers;
    std::vector<std::unique_ptr<Tensor>> inputs;
    bool is_strongly_typed = false;
};

struct Error : nvonnxparser::IParserError {
    Error(std::string words, std::string node, std::string operation)
        : text(std::move(words)), name(std::move(node)), kind(std::move(operation)) {}
    const char* desc() const override { return text.c_str(); }
    const char* nodeName() const override { return name.c_str(); }
    const char* nodeOperator() const override { return kind.c_str(); }

    std::string text, name, kind;
};

class Parser : public nvonnxparser::IParser {
  public:
    Parser(Network& network, nvinfer1::ILogger& logger) : network_(network), logger_(logger) {}

    bool parseFromFile(const char* name, int) noexcept override {
        try {
            take(state().files.at(std::filesystem::path(name).filename().string()));
        } catch (const std::exception& error) {
            logger_.log(Severity::kERROR, error.what());
            errors_.emplace_back(error.what(), "", "");
        }
        return errors_.empty();
    }

    int getNbErrors() const noexcept override { return static_cast<int>(errors_.size()); }
    const nvonnxparser::IParserError* getError(int index) const noexcept override { return &errors_[static_cast<std::size_t>(index)]; }

  private:
    void take(const Json& graph) {
        for (const Json& input : graph.at("inputs")) network_.inputs.push_back(std::make_unique<Tensor>(input));
        for (const Json& node : graph.at("nodes")) {
            const std::string operation = node.at("operation");
            const auto refuse = [&](const char* why) { errors_.emplace_back(why, node.at("name"), operation); };
            if (is_before_in_place())
                refuse("unsupported operator");
            else if (operation == "TensorScatter")
                scatter(node.at("inputs")[0], refuse);
            else
                attend(node.at("inputs"));
        }
    }

    template <typename Refuse>
    void scatter(const std::string& name, const Refuse& refuse) {
        const auto cache =
            std::find_if(network_.inputs.begin(), network_.inputs.end(), [&](const auto& input) { return input->name == name; });
        if (cache == network_.inputs.end()) return refuse("a cache must be a network input");
        if ((*cache)->shape[2] < 0) return refuse("the cache's capacity must be a number");
        network_.layers.push_back(std::make_unique<Layer>(nvinfer1::LayerType::kKVCACHE_UPDATE));
    }

    void attend(const Json& inputs) {
        auto layer = std::make_unique<Attention>();
        // A mask is the fourth input; state().loses_masks makes it the parser that forgets it without a word.
        if (inputs.size() > 3 && !state().loses_masks) layer->mask = std::make_unique<Tensor>(Json{{"name", inputs[3]}});
        network_.layers.push_back(std::move(layer));
    }

    Network& network_;
    nvinfer1::ILogger& logger_;
    std::vector<Error> errors_;
};

struct Profile : nvinfer1::IOptimizationProfile {
    bool setDimensions(const char* name, nvinfer1::OptProfileSelector select, const nvinfer1::Dims& dims) noexcept override {
        const std::vector<std::int64_t> shape(dims.d, dims.d + dims.nbDims);
        shapes[name][static_cast<std::size_t>(select)] = shape;
        return std::all_of(shape.begin(), shape.end(), [](std::int64_t size) { return size >= 0; });
    }

    /// Whether every input's least, best and most are in order.
    bool is_valid() const {
        for (const auto& [name, three] : shapes)
            for (std::size_t i = 0; i < three[0].size(); ++i)
                if (three[1].size() != three[0].size() || three[2].size() != three[0].size() || three[0][i] > three[1][i] ||
                    three[1][i] > three[2][i])
                    return false;
        return true;
    }

    Json extent(const std::string& name, std::size_t dimension) const {
        const auto& three = shapes.at(name);
        return {{"min", three[0][dimension]}, {"opt", three[1][dimension]}, {"max", three[2][dimension]}};
    }

    std::map<std::string, std::array<std::vector<std::int64_t>, num_selectors>> shapes;
};

struct Config : nvinfer1::IBuilderConfig {
    std::int32_t addOptimizationProfile(const nvinfer1::IOptimizationProfile* profile) noexcept override {
        const auto& added = static_cast<const Profile&>(*profile);
        if (!added.is_valid()) return -1;
        profiles.push_back(&added);
        return static_cast<std::int32_t>(profiles.size()) - 1;
    }
    void setProgressMonitor(nvinfer1::IProgressMonitor* watcher) noexcept override { monitor = watcher; }
    void clearFlag(nvinfer1::BuilderFlag flag) noexcept override { tf32 = tf32 && flag != nvinfer1::BuilderFlag::kTF32; }
    void setMemoryPoolLimit(nvinfer1::MemoryPoolType, std::size_t num_bytes) noexcept override { workspace = num_bytes; }
    bool tf32 = true; // as in TensorRT
    std::size_t workspace = 0;
#ifdef TRT_MAJOR_RTX
    bool setNbComputeCapabilities(std::int32_t count) noexcept override {
        capabilities.resize(static_cast<std::size_t>(count));
        return count > 0;
    }
    bool setComputeCapability(nvinfer1::ComputeCapability capability, std::int32_t index) noexcept override {
        if (static_cast<std::size_t>(index) >= capabilities.size()) return false;
        capabilities[static_cast<std::size_t>(index)] = static_cast<int>(capability);
        return capability != nvinfer1::ComputeCapability::kSM121 || state().version >= std::vector<int>{1, 5};
    }
    void setFlag(nvinfer1::BuilderFlag) noexcept override { requires_user_allocation = true; }
    std::vector<int> capabilities;
#endif
    bool requires_user_allocation = false;
    std::vector<const Profile*> profiles;
    nvinfer1::IProgressMonitor* monitor = nullptr;
};

struct Memory : nvinfer1::IHostMemory {
    explicit Memory(std::string content) : text(std::move(content)) {}
    void* data() const noexcept override { return const_cast<char*>(text.data()); }
    std::size_t size() const noexcept override { return text.size(); }

    std::string text;
};

class Builder : public nvinfer1::IBuilder {
  public:
    explicit Builder(nvinfer1::ILogger& logger) : logger_(logger) {}

    nvinfer1::INetworkDefinition* createNetworkV2(std::uint32_t flags) noexcept override {
        auto network = std::make_unique<Network>();
        network->is_strongly_typed = flags == 1U << static_cast<std::uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
        return network.release();
    }
    nvinfer1::IBuilderConfig* createBuilderConfig() noexcept override { return new Config; }
    nvinfer1::IOptimizationProfile* createOptimizationProfile() noexcept override {
        return profiles_.emplace_back(std::make_unique<Profile>()).get(); // the builder's, as in TensorRT
    }

    nvinfer1::IHostMemory* buildSerializedNetwork(nvinfer1::INetworkDefinition& network,
                                                  nvinfer1::IBuilderConfig& config) noexcept override {
        const auto& parsed = static_cast<const Network&>(network);
        const auto& settings = static_cast<const Config&>(config);
        const std::string reason = refusal(parsed, settings);
        if (!reason.empty()) return logger_.log(Severity::kERROR, reason.c_str()), nullptr;
        if (settings.monitor != nullptr) {
            settings.monitor->phaseStart("build", nullptr, 2);
            for (const std::int32_t step : {0, 1})
                if (!settings.monitor->stepComplete("build", step)) return nullptr; // ended by who watches
            settings.monitor->phaseFinish("build");
        }
        return new Memory(serialized(parsed, settings).dump());
    }

  private:
    static std::string refusal(const Network& network, const Config& config) {
        if (!network.is_strongly_typed) return "the graph's own precisions are wanted";
        bool is_fp32 = false;
        for (const auto& input : network.inputs) {
            const auto& [name, type, shape] = std::tie(input->name, input->type, input->shape);
            is_fp32 = is_fp32 || (name.rfind("past_key_values.", 0) == 0 && type == onnx_float);
            const bool is_dynamic = std::find(shape.begin(), shape.end(), -1) != shape.end();
            if (is_dynamic && config.profiles.empty()) return "dynamic inputs, but no optimization profile has been defined";
            for (const Profile* profile : config.profiles) {
                const auto at = profile->shapes.find(name);
                if (at == profile->shapes.end()) {
                    if (is_dynamic) return "a profile lacks the dynamic input " + name;
                    continue;
                }
                for (std::size_t i = 0; i < shape.size(); ++i)
                    if (at->second[0].size() != shape.size() ||
                        (shape[i] >= 0 && (at->second[0][i] != shape[i] || at->second[2][i] != shape[i])))
                        return "a profile contradicts the sizes of " + name;
            }
        }
        for (const auto& layer : network.layers)
            if (const auto* attention = dynamic_cast<const Attention*>(layer.get()); attention && is_fp32 && !attention->decomposable)
                return "attention in fp32 is not supported by a dedicated kernel";
#ifdef TRT_MAJOR_RTX
        if (config.capabilities.empty() && state().num_devices < 1) return "no GPU whose compute capability is the current one";
#endif
        return "";
    }

    static Json serialized(const Network& network, const Config& config) {
        const auto past = std::find_if(network.inputs.begin(), network.inputs.end(),
                                       [](const auto& input) { return input->name == "past_key_values.0.key"; });
        const Tensor& kv = **past;
        Json engine{{"layers", (network.inputs.size() - 3) / 2}, {"kv_heads", kv.shape[1]}, {"head_dim", kv.shape[3]}};
        engine["kv_dtype"] = kv.type == onnx_half ? "float16" : kv.type == onnx_bf16 ? "bfloat16" : "float32";
        engine["in_place"] = std::any_of(network.layers.begin(), network.layers.end(),
                                         [](const auto& layer) { return layer->getType() == nvinfer1::LayerType::kKVCACHE_UPDATE; });
        engine["allocates"] = !config.requires_user_allocation;
        engine["top_k"] = 0;
        engine["tf32"] = config.tf32;
        engine["workspace"] = config.workspace;
        for (const Profile* profile : config.profiles)
            engine["ranges"].push_back({{"batch", profile->extent("input_ids", 0)},
                                        {"slots", profile->extent("input_ids", 1)},
                                        {"outputs", profile->extent("output_index", 1)},
                                        {"capacity", profile->extent("past_key_values.0.key", 2)}});
        return engine;
    }

    nvinfer1::ILogger& logger_;
    std::vector<std::unique_ptr<Profile>> profiles_;
};

} // namespace

nvinfer1::IBuilder* nvinfer1::createInferBuilder(ILogger& logger) noexcept {
#ifndef TRT_MAJOR_RTX
    if (state().num_devices < 1) {
        logger.log(Severity::kERROR, "CUDA initialization failure with error: 35");
        return nullptr;
    }
#endif
    return new Builder(logger);
}

nvonnxparser::IParser* nvonnxparser::createParser(nvinfer1::INetworkDefinition& network, nvinfer1::ILogger& logger) noexcept {
    return new Parser(static_cast<Network&>(network), logger);
}
