// ONNX Runtime through its C++ API: load, check the signature, bind, run.
#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstring>
#include <map>
#include <set>

#define ORT_API_MANUAL_INIT // the headers' version is asked for below, so that a library that is too old is an error, not a crash
#include <onnxruntime_cxx_api.h>

#include <mars/errors.hpp>

#include "bundle/held.hpp"
#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/ort.hpp"
#include "log.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

constexpr int most_moves = 5;
constexpr std::int64_t fastest_level = 4; // of products with int4 and int8 weights: activations in 8-bit blocks

void init_api() {
    const OrtApi* api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (api == nullptr)
        throw SessionError("ONNX Runtime " + OrtBackend::version() + " is older than the headers this library was built with (1." +
                           std::to_string(ORT_API_VERSION) + "); install that version or a newer one");
    Ort::InitApi(api);
}

std::string first_line(const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
}

std::string replaced(std::string text, const std::string& part, const std::string& with) {
    for (std::size_t at = 0; part != with && (at = text.find(part, at)) != std::string::npos; at += with.size())
        text.replace(at, part.size(), with);
    return text;
}

/// A session. One that failed because the graph's directory got another name meanwhile is tried again: it is the same directory, and ONNX
/// Runtime compares names.
Ort::Session loaded(const Ort::Env& env, const std::filesystem::path& graph, const Ort::SessionOptions& options) {
    for (int left = most_moves; left > 0; --left) try {
            return Ort::Session(env, graph.c_str(), options);
        } catch (const Ort::Exception& error) {
            if (std::string_view(error.what()).find("escapes model directory") == std::string_view::npos) throw;
        }
    return Ort::Session(env, graph.c_str(), options);
}

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

/// The provider of a kind of device; throws SessionError that lists those there are.
std::string provider_of(const std::string& device) {
    std::string known;
    for (const std::string& provider : OrtBackend::devices()) {
        if (lower(provider) == device + "executionprovider") return provider;
        known += (known.empty() ? "" : ", ") + provider;
    }
    throw SessionError("this ONNX Runtime " + OrtBackend::version() + " has no device `" + device.substr(0, 60) + "` (it has: " + known +
                       "); use one of these, or an ONNX Runtime built with the one you want");
}

void append_provider(Ort::SessionOptions& options, const std::string& provider, const OrtOptions& own) {
    const OrtApi& api = Ort::GetApi();
    std::vector<const char*> names, values;
    for (const auto& [name, value] : own) {
        names.push_back(name.c_str());
        values.push_back(value.c_str());
    }
    if (provider == "CUDAExecutionProvider") {
        OrtCUDAProviderOptionsV2* settings = nullptr;
        Ort::ThrowOnError(api.CreateCUDAProviderOptions(&settings));
        const std::unique_ptr<OrtCUDAProviderOptionsV2, decltype(api.ReleaseCUDAProviderOptions)> owner(settings,
                                                                                                        api.ReleaseCUDAProviderOptions);
        if (!names.empty()) Ort::ThrowOnError(api.UpdateCUDAProviderOptions(settings, names.data(), values.data(), names.size()));
        options.AppendExecutionProvider_CUDA_V2(*settings);
    } else if (provider == "TensorrtExecutionProvider") {
        OrtTensorRTProviderOptionsV2* settings = nullptr;
        Ort::ThrowOnError(api.CreateTensorRTProviderOptions(&settings));
        const std::unique_ptr<OrtTensorRTProviderOptionsV2, decltype(api.ReleaseTensorRTProviderOptions)> owner(
            settings, api.ReleaseTensorRTProviderOptions);
        if (!names.empty()) Ort::ThrowOnError(api.UpdateTensorRTProviderOptions(settings, names.data(), values.data(), names.size()));
        options.AppendExecutionProvider_TensorRT_V2(*settings);
    } else if (provider != "CPUExecutionProvider") {
        options.AppendExecutionProvider(provider.substr(0, provider.rfind("ExecutionProvider")), {own.begin(), own.end()});
    }
}

void ORT_API_CALL drop_message(void*, OrtLoggingLevel, const char*, const char*, const char*, const char*) {}

/// `user` is the OnLog of a session that has one.
void ORT_API_CALL pass_message(void* user, OrtLoggingLevel severity, const char*, const char*, const char*, const char* message) {
    const LogLevel level = severity >= ORT_LOGGING_LEVEL_ERROR     ? LogLevel::error
                           : severity == ORT_LOGGING_LEVEL_WARNING ? LogLevel::warning
                           : severity == ORT_LOGGING_LEVEL_INFO    ? LogLevel::info
                                                                   : LogLevel::debug;
    note(*static_cast<const OnLog*>(user), level, message == nullptr ? "" : message);
}

/// Of each buffer [kv_heads, length, head_dim], in memory of its own or of somebody else's.
struct OrtSaved : Saved {
    using Saved::Saved;
    std::vector<const unsigned char*> buffers;
    std::vector<std::vector<unsigned char>> own;
    std::shared_ptr<const void> owner;
};

/// KV buffers in host memory: one [rows, kv_heads, capacity, head_dim] array for each layer's keys and values.
class OrtCache : public Cache {
  public:
    OrtCache(Ort::Session& session, std::size_t num_buffers, std::int64_t num_rows, std::int64_t kv_heads, std::int64_t entry_bytes)
        : binding(session), buffers_(num_buffers), num_rows_(num_rows), kv_heads_(kv_heads), entry_bytes_(entry_bytes) {}

    std::int64_t capacity() const override { return capacity_; }

    void reserve(std::int64_t capacity) override {
        if (capacity <= capacity_) return;
        const std::int64_t grown = bucket(capacity, capacity_);
        try {
            grow(grown);
        } catch (const std::exception&) { // bad_alloc, or a length no vector can have
            throw MemoryError("no memory for a KV cache of " + std::to_string(num_rows_) + " rows of " + std::to_string(grown) +
                              " entries; use fewer rows or shorter prompts");
        }
    }

    void move(std::int64_t source, std::int64_t target, std::int64_t length) override {
        for (Buffer& buffer : buffers_)
            for (std::int64_t head = 0; head < kv_heads_; ++head)
                std::memcpy(row(buffer, target) + head * capacity_ * entry_bytes_, row(buffer, source) + head * capacity_ * entry_bytes_,
                            static_cast<std::size_t>(length * entry_bytes_));
    }

    std::int64_t entry_bytes() const override { return static_cast<std::int64_t>(buffers_.size()) * kv_heads_ * entry_bytes_; }

    std::shared_ptr<const Saved> save(std::int64_t index, std::int64_t length) override {
        auto saved = std::make_shared<OrtSaved>(length);
        const std::int64_t run = length * entry_bytes_, pitch = capacity_ * entry_bytes_;
        for (Buffer& buffer : buffers_) {
            Buffer& copy = saved->own.emplace_back(static_cast<std::size_t>(kv_heads_ * run));
            saved->buffers.push_back(copy.data());
            for (std::int64_t head = 0; head < kv_heads_; ++head)
                std::memcpy(copy.data() + head * run, row(buffer, index) + head * pitch, static_cast<std::size_t>(run));
        }
        return saved;
    }

    void load(std::int64_t index, const Saved& saved, std::int64_t length) override {
        const auto& from = dynamic_cast<const OrtSaved&>(saved);
        const std::int64_t run = saved.length * entry_bytes_, pitch = capacity_ * entry_bytes_;
        for (std::size_t i = 0; i < buffers_.size(); ++i)
            for (std::int64_t head = 0; head < kv_heads_; ++head)
                std::memcpy(row(buffers_[i], index) + head * pitch, from.buffers[i] + head * run,
                            static_cast<std::size_t>(length * entry_bytes_));
    }

    std::shared_ptr<const Saved> bring(const HostEntries& entries) override {
        auto saved = std::make_shared<OrtSaved>(entries.length);
        for (std::size_t i = 0; i < buffers_.size(); ++i)
            saved->buffers.push_back(entries.data + static_cast<std::int64_t>(i) * kv_heads_ * entries.length * entry_bytes_);
        saved->owner = entries.owner;
        return saved;
    }

    /// Memory of buffer `i` from row `first` on.
    unsigned char* at(std::size_t i, std::int64_t first) { return row(buffers_[i], first); }

    std::int64_t row_bytes() const { return kv_heads_ * capacity_ * entry_bytes_; }

    void interrupt() override {
        is_interrupted = true;
        options.SetTerminate();
    }

    std::atomic<bool> is_interrupted{false};
    Ort::RunOptions options; // of every run on these rows
    Ort::IoBinding binding;
    Shape bound; // what the KV bindings stand for: {first row, rows, capacity, logits wanted}

  private:
    using Buffer = std::vector<unsigned char>;

    void grow(std::int64_t grown) {
        const std::int64_t old_head = capacity_ * entry_bytes_, new_head = grown * entry_bytes_;
        for (Buffer& buffer : buffers_) {
            // Zeros, not garbage: an entry that is masked out still enters the product 0 * value, and 0 * NaN is NaN.
            Buffer fresh(static_cast<std::size_t>(num_rows_ * kv_heads_ * new_head));
            for (std::int64_t head = 0; old_head > 0 && head < num_rows_ * kv_heads_; ++head)
                std::memcpy(fresh.data() + head * new_head, buffer.data() + head * old_head, static_cast<std::size_t>(old_head));
            buffer = std::move(fresh);
        }
        capacity_ = grown;
    }

    unsigned char* row(Buffer& buffer, std::int64_t index) const { return buffer.data() + index * row_bytes(); }

    std::vector<Buffer> buffers_;
    std::int64_t num_rows_, kv_heads_, entry_bytes_, capacity_ = 0;
};

} // namespace

struct OrtBackend::Graph {
    std::filesystem::path file;
    std::vector<std::string> outputs, past_names, present_names;
    std::int64_t max_capacity = 0, vocab_size = 0, top_k = 0, kv_heads = 0, head_dim = 0, element_bytes = 0;
    ONNXTensorElementDataType kv_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    bool on_cpu = true, is_firm = false;
    Watched weights; // ONNX Runtime has them mapped
    std::atomic<std::chrono::steady_clock::rep> run_time{0};
    OnLog on_log; // hears the session, to its end
    Ort::Env env{nullptr};
    Ort::Session session{nullptr};
    Ort::MemoryInfo memory{nullptr};

    template <typename T>
    Ort::Value tensor(const std::vector<T>& values, const Shape& shape) const {
        // ONNX Runtime writes through outputs only; its API has no const tensors.
        return Ort::Value::CreateTensor<T>(memory, const_cast<T*>(values.data()), values.size(), shape.data(), shape.size());
    }

    void bind_kv(OrtCache& cache, std::int64_t first, std::int64_t rows) const {
        const Shape shape{rows, kv_heads, cache.capacity(), head_dim};
        for (std::size_t i = 0; i < past_names.size(); ++i) {
            const Ort::Value kv = Ort::Value::CreateTensor(memory, cache.at(i, first), static_cast<std::size_t>(rows * cache.row_bytes()),
                                                           shape.data(), shape.size(), kv_type);
            cache.binding.BindInput(past_names[i].c_str(), kv);
            cache.binding.BindOutput(present_names[i].c_str(), kv);
        }
    }

    template <typename T>
    void bind_result(OrtCache& cache, const std::string& name, std::vector<T>& values, Shape shape) const {
        std::size_t size = 1;
        for (const std::int64_t dimension : shape) size *= static_cast<std::size_t>(dimension);
        values.resize(size);
        cache.binding.BindOutput(name.c_str(), tensor(values, shape));
    }

    void bind_results(OrtCache& cache, const StepInput& input, bool want_logits, StepOutput& output) const {
        for (const std::string& name : outputs) {
            const Shape shape{input.rows, input.outputs};
            if (name == "token_ids") bind_result(cache, name, output.token_ids, shape);
            if (name == "confidence") bind_result(cache, name, output.confidence, shape);
            if (name == "margin") bind_result(cache, name, output.margin, shape);
            if (name == "entropy") bind_result(cache, name, output.entropy, shape);
            // What is not bound is not computed.
            if (name == "topk_ids" && input.want_topk) bind_result(cache, name, output.topk_ids, {input.rows, input.outputs, top_k});
            if (name == "topk_logprobs" && input.want_topk) {
                bind_result(cache, name, output.topk_logprobs, {input.rows, input.outputs, top_k});
                output.top_k = top_k;
            }
            if (name == "logits" && want_logits) bind_result(cache, name, output.logits, {input.rows, input.outputs, vocab_size});
        }
        if (!want_logits) output.logits.clear();
        if (!input.want_topk) output.top_k = 0;
    }

    void check_signature() {
        std::set<std::string> wanted{"input_ids", "kv_length", "output_index"}, odd;
        wanted.insert(past_names.begin(), past_names.end());
        wanted.insert(outputs.begin(), outputs.end());
        wanted.insert(present_names.begin(), present_names.end());
        Ort::AllocatorWithDefaultOptions allocator;
        const auto check = [&](const std::string& name, const Ort::TypeInfo& type) {
            if (wanted.erase(name) == 0) odd.insert(name);
            const bool is_tensor = type.GetONNXType() == ONNX_TYPE_TENSOR;
            const Shape shape = is_tensor ? type.GetTensorTypeAndShapeInfo().GetShape() : Shape{};
            if (name.rfind("past_key_values.", 0) == 0 || name.rfind("present.", 0) == 0) {
                if (shape.size() != 4 || shape[1] != kv_heads || shape[3] != head_dim ||
                    type.GetTensorTypeAndShapeInfo().GetElementType() != kv_type)
                    odd.insert(name);
            } else if (name == "logits" && (shape.size() != 3 || shape[2] != vocab_size)) {
                odd.insert(name);
            } else if (name == "topk_ids" || name == "topk_logprobs") {
                if (shape.size() != 3 || shape[2] < 1 || shape[2] > vocab_size || (top_k != 0 && shape[2] != top_k)) odd.insert(name);
                top_k = shape.size() == 3 ? shape[2] : 0;
            }
        };
        for (std::size_t i = 0; i < session.GetInputCount(); ++i)
            check(session.GetInputNameAllocated(i, allocator).get(), session.GetInputTypeInfo(i));
        for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
            check(session.GetOutputNameAllocated(i, allocator).get(), session.GetOutputTypeInfo(i));
        odd.insert(wanted.begin(), wanted.end());
        if (odd.empty()) return;
        std::string names;
        int count = 0;
        for (const std::string& name : odd)
            if (count++ < 6) names += (names.empty() ? "" : ", ") + name;
        throw BundleError(file.string() + ": the graph and the manifest disagree about " + names + "; export again");
    }
};

OrtBackend::OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, std::optional<int> threads,
                       const OrtOptions& options, OnLog on_log)
    : graph_(std::make_unique<Graph>()) {
    const std::map<std::string, std::pair<ONNXTensorElementDataType, int>> kv_types{
        {"float32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4}}, {"float16", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2}}};
    const auto kv = kv_types.find(variant.kv_dtype);
    if (variant.kv_layout != "static" || kv == kv_types.end())
        throw SessionError("variant " + variant.name + ": KV layout " + variant.kv_layout + " in " + variant.kv_dtype +
                           " does not run on ONNX Runtime");
    if (threads && *threads < 1) throw SessionError("threads must be 1 or more, not " + std::to_string(*threads));
    init_api();
    const DeviceName named = DeviceName::of(device);
    const std::string provider = provider_of(named.kind);
    const ModelInfo& model = bundle.manifest.model;
    Graph& graph = *graph_;
    graph.file = bundle.path / variant.file;
    graph.outputs = variant.outputs;
    graph.max_capacity = model.context_length;
    graph.vocab_size = model.vocab_size;
    graph.kv_heads = model.num_kv_heads;
    graph.head_dim = model.head_dim;
    std::tie(graph.kv_type, graph.element_bytes) = kv->second;
    graph.on_cpu = provider == "CPUExecutionProvider";
    graph.on_log = std::move(on_log);
    const OrtParts parts = parted(options, graph.on_cpu, named.number);
    // Products of these add up in one order whatever the step's size, from two slots on; angles are computed many at a time.
    graph.is_firm = graph.on_cpu && (variant.precision == "float32" || variant.precision == "w8a8") && model.head_dim % 32 == 0;
    for (std::int64_t i = 0; i < model.num_layers; ++i)
        for (const char* kind : {".key", ".value"}) {
            graph.past_names.push_back("past_key_values." + std::to_string(i) + kind);
            graph.present_names.push_back("present." + std::to_string(i) + kind);
        }
    const std::filesystem::path place = bundle.place(variant.file);
    try {
        graph.env = Ort::Env(ORT_LOGGING_LEVEL_FATAL, "mars", drop_message, nullptr);
        graph.memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        Ort::SessionOptions settings;
        settings.SetLogSeverityLevel(graph.on_log ? ORT_LOGGING_LEVEL_WARNING : ORT_LOGGING_LEVEL_FATAL);
        if (graph.on_log) Ort::ThrowOnError(Ort::GetApi().SetUserLoggingFunction(settings, pass_message, &graph.on_log));
        if (threads) settings.SetIntraOpNumThreads(*threads);
        settings.AddConfigEntry("session.qdq_matmulnbits_accuracy_level",
                                std::to_string(variant.accuracy_level.value_or(fastest_level)).c_str());
        for (const auto& [name, value] : parts.entries) settings.AddConfigEntry(name.c_str(), value.c_str());
        append_provider(settings, provider, parts.of_provider);
        graph.session = loaded(graph.env, place, settings);
        if (graph.on_cpu && variant.weights && bundle.held)
            graph.weights = Watched(bundle.place(*variant.weights), bundle.path / *variant.weights);
        graph.check_signature();
    } catch (const Ort::Exception& error) {
        throw SessionError(graph.file.string() + ": ONNX Runtime " + version() +
                           " cannot load the graph: " + replaced(first_line(error), place.parent_path().string(), bundle.path.string()));
    }
}

OrtBackend::~OrtBackend() = default;

const std::vector<std::string>& OrtBackend::outputs() const { return graph_->outputs; }

std::int64_t OrtBackend::max_capacity() const { return graph_->max_capacity; }

std::optional<std::int64_t> OrtBackend::firm_slots() const { return graph_->is_firm ? std::optional<std::int64_t>(2) : std::nullopt; }

std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) {
    return std::make_unique<OrtCache>(graph_->session, graph_->past_names.size(), num_rows, graph_->kv_heads,
                                      graph_->head_dim * graph_->element_bytes);
}

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& memory = dynamic_cast<OrtCache&>(cache);
    Graph& graph = *graph_;
    output.outputs = input.outputs;
    output.vocab_size = graph.vocab_size;
    graph.weights.check();
    try {
        const Shape layout{first, input.rows, memory.capacity(), want_logits ? 1 : 0, input.want_topk ? 1 : 0};
        // Another device gets a copy of a host tensor when it is bound, so there the KV must be bound at every step.
        if (memory.bound != layout || !graph.on_cpu) {
            memory.binding.ClearBoundOutputs();
            graph.bind_kv(memory, first, input.rows);
            memory.bound = layout;
        }
        memory.binding.BindInput("input_ids", graph.tensor(input.input_ids, {input.rows, input.slots}));
        memory.binding.BindInput("kv_length", graph.tensor(input.kv_length, {input.rows}));
        memory.binding.BindInput("output_index", graph.tensor(input.output_index, {input.rows, input.outputs}));
        graph.bind_results(memory, input, want_logits, output);
        const auto begun = std::chrono::steady_clock::now();
        graph.session.Run(memory.options, memory.binding);
        graph.run_time += (std::chrono::steady_clock::now() - begun).count();
    } catch (const Ort::Exception& error) {
        if (memory.is_interrupted) throw Interrupted("the answer was ended inside a step");
        const std::string what = "ONNX Runtime failed in a step of " + std::to_string(input.rows) + " x " + std::to_string(input.slots) +
                                 " slots: " + first_line(error);
        if (is_lasting(error.what())) throw DeviceLost(what + lost_advice);
        throw DeviceError(what);
    }
}

double OrtBackend::run_seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::duration(graph_->run_time)).count();
}

std::vector<std::string> OrtBackend::devices() {
    init_api();
    return Ort::GetAvailableProviders();
}

std::string OrtBackend::version() { return OrtGetApiBase()->GetVersionString(); }

} // namespace mars
