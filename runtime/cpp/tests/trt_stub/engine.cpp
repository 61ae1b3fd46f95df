// A TensorRT whose engines are JSON: {"layers", "kv_heads", "head_dim", "in_place", "ranges"}. Their KV entries are the tokens
// themselves, so that a stale or misplaced entry shows in what they predict.
#include <NvInfer.h>
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "stub.hpp"

namespace {

using Json = nlohmann::json;
using stub::state;

std::size_t size_of(const stub::Shape& shape) {
    std::size_t size = 1;
    for (const std::int64_t dimension : shape) size *= static_cast<std::size_t>(dimension);
    return size;
}

void want(bool good, const char* what) {
    if (!good) throw std::logic_error(what);
}

/// The front of an allocation that has room for a tensor.
template <typename T>
T* view(const stub::Bound& bound, const std::string& name, const stub::Shape& shape) {
    unsigned char* address = bound.addresses.at(name);
    auto owner = state().memory.upper_bound(address);
    want(owner != state().memory.begin(), "an address that was never allocated");
    --owner;
    want(address + size_of(shape) * sizeof(T) <= owner->first + owner->second, "a tensor beyond its memory");
    return reinterpret_cast<T*>(address);
}

/// One step of an engine over what a context was bound to.
class Execution {
  public:
    Execution(const Json& engine, const stub::Bound& bound) : engine_(engine), bound_(bound) {}

    void operator()() {
        state().events.emplace_back("execute", 0);
        const stub::Shape &window = bound_.shapes.at("input_ids"), &wanted = bound_.shapes.at("output_index");
        for (const auto& tensor : bound_.shapes) want(tensor.second[0] == window[0], "as many rows of every input");
        rows_ = window[0];
        slots_ = window[1];
        outputs_ = wanted[1];
        ids_ = view<std::int64_t>(bound_, "input_ids", window);
        lengths_ = view<std::int64_t>(bound_, "kv_length", {rows_});
        for (std::int64_t layer = 0; layer < engine_.at("layers"); ++layer)
            for (const char* kind : {".key", ".value"}) write(std::to_string(layer) + kind);
        predict(view<std::int64_t>(bound_, "output_index", wanted), view<std::int64_t>(bound_, "token_ids", wanted),
                view<float>(bound_, "confidence", wanted));
        if (const std::int64_t k = engine_.at("top_k"); k > 0) choose(wanted, k);
    }

  private:
    void write(const std::string& suffix) {
        const std::string past_name = "past_key_values." + suffix, present_name = "present." + suffix;
        const stub::Shape shape = bound_.shapes.at(past_name);
        want(shape[0] == rows_, "as many rows of KV as of ids");
        auto* past = view<float>(bound_, past_name, shape);
        const bool in_place = engine_.at("in_place");
        if (in_place) want(bound_.addresses.at(past_name) == bound_.addresses.at(present_name), "past and present are one memory");
        const stub::Shape window{rows_, shape[1], slots_, shape[3]};
        auto* fresh = in_place ? nullptr : view<float>(bound_, present_name, window);
        seen_.assign(static_cast<std::size_t>(rows_), {});
        for (std::int64_t row = 0; row < rows_; ++row) {
            want(lengths_[row] + slots_ <= shape[2], "a step within its capacity");
            for (std::int64_t head = 0; head < shape[1]; ++head) {
                float* entries = past + (row * shape[1] + head) * shape[2] * shape[3];
                fake::Tokens known;
                for (std::int64_t i = 0; i < lengths_[row]; ++i) known.push_back(static_cast<std::int64_t>(entries[i * shape[3]]));
                for (std::int64_t slot = 0; slot < slots_; ++slot) {
                    float* target = in_place ? entries + (lengths_[row] + slot) * shape[3]
                                             : fresh + ((row * shape[1] + head) * slots_ + slot) * shape[3];
                    std::fill_n(target, shape[3], static_cast<float>(ids_[row * slots_ + slot]));
                    known.push_back(ids_[row * slots_ + slot]);
                }
                fake::Tokens& all = seen_[static_cast<std::size_t>(row)];
                want(head == 0 || all == known, "all heads hold the same entries");
                all = known;
            }
        }
    }

    void predict(const std::int64_t* index, std::int64_t* token_ids, float* confidence) const {
        for (std::int64_t row = 0; row < rows_; ++row)
            for (std::int64_t j = 0; j < outputs_; ++j) {
                fake::Tokens known = seen_[static_cast<std::size_t>(row)];
                want(0 <= index[row * outputs_ + j] && index[row * outputs_ + j] < slots_, "a prediction of the window");
                known.resize(static_cast<std::size_t>(lengths_[row] + index[row * outputs_ + j] + 1));
                const std::size_t length = known.size();
                while (!known.empty() && known.back() == fake::mask) known.pop_back();
                // Rows and slots that only pad a fixed shape may see anything; their results are not read.
                const bool is_stale = std::find(known.begin(), known.end(), fake::mask) != known.end();
                std::tie(token_ids[row * outputs_ + j], confidence[row * outputs_ + j]) =
                    is_stale ? std::pair(std::int64_t{-7}, -1.0F)
                             : state().predict(known, static_cast<std::int64_t>(length - known.size()));
            }
    }

    /// The top-k of each prediction, whose log-probabilities are 0, -1, -2 and so on; -7 if none are set.
    void choose(const stub::Shape& wanted, std::int64_t k) const {
        const stub::Shape wide{wanted[0], wanted[1], k};
        auto* ids = view<std::int64_t>(bound_, "topk_ids", wide);
        auto* logprobs = view<float>(bound_, "topk_logprobs", wide);
        std::fill_n(ids, size_of(wide), -7);
        std::fill_n(logprobs, size_of(wide), -7.0F);
        for (std::int64_t i = 0; i < wanted[0] * wanted[1]; ++i) logprobs[i * k] = -6.0F;
        if (!state().wide) return;
        const auto *index = view<std::int64_t>(bound_, "output_index", wanted), *first = view<std::int64_t>(bound_, "token_ids", wanted);
        for (std::int64_t i = 0; i < wanted[0] * wanted[1]; ++i, ids += k, logprobs += k) {
            const fake::Tokens likely = state().wide(lengths_[i / wanted[1]] + index[i] + 1, first[i]);
            want(static_cast<std::int64_t>(likely.size()) == k, "as many tokens as the engine gives");
            std::copy(likely.begin(), likely.end(), ids);
            for (std::int64_t j = 0; j < k; ++j) logprobs[j] = static_cast<float>(-std::max(std::int64_t{0}, j - state().num_ties));
        }
    }

    const Json& engine_;
    const stub::Bound bound_;
    std::int64_t rows_ = 0, slots_ = 0, outputs_ = 0;
    const std::int64_t *ids_ = nullptr, *lengths_ = nullptr;
    std::vector<fake::Tokens> seen_;
};

class Context : public nvinfer1::IExecutionContext {
  public:
    Context(const Json& engine, nvinfer1::ILogger& logger) : engine_(engine), logger_(logger), place_(state().contexts.size()) {
        state().contexts.push_back(bound_.get());
    }
    ~Context() override {
        if (place_ < state().contexts.size()) state().contexts[place_] = nullptr;
    }

    bool setInputShape(const char* name, const nvinfer1::Dims& dims) noexcept override {
        const stub::Shape shape(dims.d, dims.d + dims.nbDims);
        if (bound_->range < 0) return false; // a profile comes first: choosing one drops the shapes
        const Json& range = engine_["ranges"][static_cast<std::size_t>(bound_->range)];
        const auto fits = [&](const char* dimension, std::int64_t size) {
            return range[dimension]["min"] <= size && size <= range[dimension]["max"];
        };
        if (state().unknown_tensors.count(name) > 0 || !fits("batch", shape[0])) return false;
        if (std::string(name) == "input_ids" && !fits("slots", shape[1])) return false;
        if (std::string(name) == "output_index" && !fits("outputs", shape[1])) return false;
        if (std::string(name) == "input_ids") state().most_rows = std::max(state().most_rows, shape[0]);
        if (bound_->shapes[name] != shape) {
            bound_->shapes[name] = shape;
            ++bound_->changes;
            is_prepared_ = false;
        }
        return true;
    }

    bool setTensorAddress(const char* name, void* address) noexcept override {
        if (bound_->addresses[name] != address) ++bound_->changes;
        bound_->addresses[name] = static_cast<unsigned char*>(address);
        return state().unknown_tensors.count(name) == 0;
    }

    void setDeviceMemoryV2(void* memory, std::int64_t num_bytes) noexcept override {
        scratch_ = num_bytes >= 512 ? static_cast<unsigned char*>(memory) : nullptr;
    }

    bool setOptimizationProfileAsync(std::int32_t index, cudaStream_t stream) noexcept override {
        bound_->range = index;
        bound_->shapes.clear();
        stream_ = stream;
        return static_cast<std::size_t>(index) < engine_["ranges"].size();
    }

#ifdef TRT_MAJOR_RTX
    bool isStreamCapturable(cudaStream_t) const noexcept override { return !state().allocates; }
#endif

    bool enqueueV3(cudaStream_t stream) noexcept override {
        if (state().breaks || state().breaks_after == 0) state().is_broken = true;
        if (state().breaks_after > 0 && !stub::is_capturing(stream)) --state().breaks_after;
        const std::string reason = refusal(stream);
        if (!reason.empty()) {
            logger_.log(nvinfer1::ILogger::Severity::kERROR, reason.c_str());
            return false;
        }
        if (state().contexts.size() > place_ && runs_++ == 0) ++state().compiled;
        is_prepared_ = true;
        stub::submit(
            stream,
            [execution = Execution(engine_, *bound_), scratch = scratch_, bound = std::weak_ptr<stub::Bound>(bound_)]() mutable {
                want(!bound.expired(), "a context that is gone before its step");
                want(state().memory.count(scratch) == 1, "scratch memory that was given back");
                execution();
            },
            bound_);
        return true;
    }

  private:
    std::string refusal(cudaStream_t stream) const {
        if (state().is_broken) return "Cuda Runtime (an illegal memory access was encountered)";
        if (state().fails) return "the test made the stub fail";
        if (stub::current() != state().gpu) return "another GPU is the current one";
        if (stub::last_error() != cudaSuccess) return "an error of an earlier call was not asked for";
        if (scratch_ == nullptr) return "no memory to work in";
        if (stream != stream_) return "not the stream that the profile was chosen on";
        if (stub::is_capturing(stream) && state().allocates) {
            void* memory = nullptr;
            cudaMalloc(&memory, 1); // which spoils the capture
            return "memory is needed";
        }
        if (stub::is_capturing(stream) && !is_prepared_) return "the first run after a change of shapes cannot be captured";
        const std::vector<std::string> inputs{"input_ids", "kv_length", "output_index"};
        for (const std::string& name : inputs)
            if (bound_->shapes.count(name) == 0) return "no shape for " + name;
        std::vector<std::string> all{inputs[0], inputs[1], inputs[2], "token_ids", "confidence"};
        if (engine_.at("top_k") > 0) all.insert(all.end(), {"topk_ids", "topk_logprobs"});
        for (const std::string& name : all)
            if (!is_addressed(name)) return "no address for " + name + ", or one that is not aligned";
        for (std::int64_t layer = 0; layer < engine_.at("layers"); ++layer)
            for (const char* kind : {".key", ".value"}) {
                const std::string suffix = std::to_string(layer) + kind, past = "past_key_values." + suffix, present = "present." + suffix;
                if (bound_->shapes.count(past) == 0) return "no shape for " + past;
                if (!is_addressed(past) || !is_addressed(present)) return "no address for " + suffix + ", or one that is not aligned";
                if ((bound_->addresses.at(past) == bound_->addresses.at(present)) != engine_.at("in_place").get<bool>())
                    return "past and present are one address where the engine writes in place, and nowhere else";
            }
        return "";
    }

    bool is_addressed(const std::string& name) const {
        const auto at = bound_->addresses.find(name);
        return at != bound_->addresses.end() && at->second != nullptr && reinterpret_cast<std::uintptr_t>(at->second) % 256 == 0;
    }

    const Json& engine_;
    nvinfer1::ILogger& logger_;
    std::size_t place_;
    std::shared_ptr<stub::Bound> bound_ = std::make_shared<stub::Bound>();
    unsigned char* scratch_ = nullptr;
    cudaStream_t stream_ = nullptr;
    bool is_prepared_ = false;
    int runs_ = 0;
};

#ifdef TRT_MAJOR_RTX
class Kernels : public nvinfer1::IHostMemory {
  public:
    void* data() const noexcept override { return const_cast<char*>(text_.data()); }
    std::size_t size() const noexcept override { return text_.size(); }

  private:
    std::string text_ = "kernels " + std::string(static_cast<std::size_t>(state().compiled), 'k');
};

class Cache : public nvinfer1::IRuntimeCache {
  public:
    nvinfer1::IHostMemory* serialize() const noexcept override { return new Kernels; }
    bool deserialize(const void* data, std::size_t num_bytes) noexcept override {
        return std::string(static_cast<const char*>(data), num_bytes).rfind("kernels ", 0) == 0;
    }
};

class RuntimeConfig : public nvinfer1::IRuntimeConfig {
  public:
    void setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy) noexcept override {}
    void setDynamicShapesKernelSpecializationStrategy(nvinfer1::DynamicShapesKernelSpecializationStrategy) noexcept override {}
    nvinfer1::IRuntimeCache* createRuntimeCache() const noexcept override { return new Cache; }
    bool setRuntimeCache(const nvinfer1::IRuntimeCache&) noexcept override { return true; }
};
#endif

class Engine : public nvinfer1::ICudaEngine {
  public:
    Engine(Json engine, nvinfer1::ILogger& logger) : engine_(std::move(engine)), logger_(logger) {
        const bool in_place = engine_.at("in_place");
        const Json kv{-1, engine_.at("kv_heads"), -1, engine_.at("head_dim")};
        const std::string kv_type = engine_.value("kv_dtype", "float32");
        add("input_ids", "int64", {-1, -1});
        add("kv_length", "int64", Json::array({-1}));
        add("output_index", "int64", {-1, -1});
        add("token_ids", "int64", {-1, -1});
        add("confidence", "float32", {-1, -1});
        if (const std::int64_t k = engine_.at("top_k"); k > 0) {
            add("topk_ids", "int64", {-1, -1, k});
            add("topk_logprobs", "float32", {-1, -1, k});
        }
        for (std::int64_t layer = 0; layer < engine_.at("layers"); ++layer)
            for (const char* kind : {".key", ".value"}) {
                const std::string suffix = std::to_string(layer) + kind;
                add("past_key_values." + suffix, kv_type.c_str(), kv);
                add("present." + suffix, kv_type.c_str(), kv, in_place ? "past_key_values." + suffix : "");
            }
    }

    std::int64_t getDeviceMemorySizeV2() const noexcept override { return 512; }
    std::int32_t getNbIOTensors() const noexcept override { return static_cast<std::int32_t>(tensors_.size()); }
    const char* getIOTensorName(std::int32_t index) const noexcept override {
        return tensors_[static_cast<std::size_t>(index)].at("name").get_ref<const std::string&>().c_str();
    }
    nvinfer1::DataType getTensorDataType(const char* name) const noexcept override {
        const Json& dtype = of(name).at("dtype");
        return dtype == "float32"   ? nvinfer1::DataType::kFLOAT
               : dtype == "float16" ? nvinfer1::DataType::kHALF
               : dtype == "int64"   ? nvinfer1::DataType::kINT64
                                    : nvinfer1::DataType::kINT32;
    }
    nvinfer1::Dims getTensorShape(const char* name) const noexcept override {
        const Json& shape = of(name).at("shape");
        nvinfer1::Dims dims{static_cast<std::int32_t>(shape.size()), {}};
        std::copy(shape.begin(), shape.end(), dims.d);
        return dims;
    }
    const char* getAliasedInputTensor(const char* name) const noexcept override {
        const auto& alias = of(name).at("alias").get_ref<const std::string&>();
        return alias.empty() ? nullptr : alias.c_str();
    }
#ifdef TRT_MAJOR_RTX
    nvinfer1::IRuntimeConfig* createRuntimeConfig() noexcept override { return new RuntimeConfig; }
    nvinfer1::IExecutionContext* createExecutionContext(nvinfer1::IRuntimeConfig*) noexcept override {
        return new Context(engine_, logger_);
    }
#else
    nvinfer1::IExecutionContext* createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy) noexcept override {
        return new Context(engine_, logger_);
    }
#endif

  private:
    void add(const std::string& name, const char* dtype, Json shape, const std::string& alias = "") {
        tensors_.push_back({{"name", name}, {"dtype", dtype}, {"shape", std::move(shape)}, {"alias", alias}});
        if (const auto other = state().tensors.find(name); other != state().tensors.end()) tensors_.back().update(other->second);
    }

    const Json& of(const std::string& name) const {
        return *std::find_if(tensors_.begin(), tensors_.end(), [&](const Json& each) { return each.at("name") == name; });
    }

    Json engine_;
    nvinfer1::ILogger& logger_;
    std::vector<Json> tensors_;
};

class Runtime : public nvinfer1::IRuntime {
  public:
    explicit Runtime(nvinfer1::ILogger& logger) : logger_(logger) {}

    nvinfer1::ICudaEngine* deserializeCudaEngine(const void* data, std::size_t num_bytes) noexcept override {
        Json engine = Json::parse(std::string(static_cast<const char*>(data), num_bytes), nullptr, false);
        if (engine.is_object()) return new Engine(std::move(engine), logger_);
        logger_.log(nvinfer1::ILogger::Severity::kWARNING, "an unexpected warning");
        logger_.log(nvinfer1::ILogger::Severity::kERROR, "the magic tag does not match");
        return nullptr;
    }

  private:
    nvinfer1::ILogger& logger_;
};

} // namespace

nvinfer1::IRuntime* nvinfer1::createInferRuntime(ILogger& logger) noexcept { return new Runtime(logger); }

std::int32_t getInferLibMajorVersion() noexcept { return state().version[0]; }
std::int32_t getInferLibMinorVersion() noexcept { return state().version[1]; }
std::int32_t getInferLibPatchVersion() noexcept { return state().version[2]; }
std::int32_t getInferLibBuildVersion() noexcept { return state().version[3]; }
