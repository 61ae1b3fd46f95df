// ONNX Runtime through its C++ API: check the signature, bind, run.
#include "device/ort.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <tuple>

#include <mars/errors.hpp>

#include "bundle/held.hpp"
#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/ort_api.hpp"
#include "device/ort_memory.hpp"
#include "device/ort_open.hpp"
#include "device/ort_rows.hpp"
#include "device/scratch.hpp"
#include "log.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t fastest_level = 4; // of products with int4 and int8 weights: activations in 8-bit blocks
constexpr const char* step_advice = "; not enough memory: run fewer rows at once, shorten the prompt, or free memory";
constexpr const char* open_advice = "; not enough memory: use a model of fewer or smaller weights, or free memory";

std::string replaced(std::string text, const std::string& part, const std::string& with) {
    for (std::size_t at = 0; part != with && (at = text.find(part, at)) != std::string::npos; at += with.size())
        text.replace(at, part.size(), with);
    return text;
}

/// Bytes of a file of the bundle; 0 for one it does not list.
std::int64_t size_of(const Bundle& bundle, const std::string& file) {
    for (const FileEntry& entry : bundle.manifest.files)
        if (entry.path == file) return entry.size;
    return 0;
}

} // namespace

struct OrtBackend::Graph {
    std::filesystem::path file;
    std::vector<std::string> outputs, past_names, present_names;
    std::int64_t max_capacity = 0, vocab_size = 0, top_k = 0, kv_heads = 0, head_dim = 0, element_bytes = 0;
    ONNXTensorElementDataType kv_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    bool on_cpu = true, is_firm = false;
    Watched weights; // ONNX Runtime has them mapped
    std::atomic<std::chrono::steady_clock::rep> run_time{0};
    std::optional<Scratch> scratch; // on the CPU
    std::shared_ptr<OrtGraph> opened;
    std::shared_ptr<OrtMemory> memory; // of KV rows on a device; without it they are in host memory, and cross off the CPU
    Ort::MemoryInfo host{nullptr};

    /// Where a step's inputs and results are on their way: in memory that the device copies from and to, or where the caller has them.
    struct Way {
        struct Result {
            unsigned char *target, *source;
            std::size_t num_bytes;
        };
        unsigned char* next = nullptr;
        std::vector<Result> results;
    };

    static constexpr std::size_t alignment = 64;

    template <typename T>
    Ort::Value tensor(Way& way, const std::vector<T>& values, const Shape& shape, bool is_result) const {
        // ONNX Runtime writes through outputs only; its API has no const tensors.
        auto* data = const_cast<T*>(values.data());
        if (way.next == nullptr) return Ort::Value::CreateTensor<T>(host, data, values.size(), shape.data(), shape.size());
        const std::size_t num_bytes = values.size() * sizeof(T);
        unsigned char* staged = way.next;
        way.next += (num_bytes + alignment - 1) / alignment * alignment;
        if (is_result)
            way.results.push_back({reinterpret_cast<unsigned char*>(data), staged, num_bytes});
        else
            std::memcpy(staged, data, num_bytes);
        (is_result ? memory->fetched : memory->sent) += num_bytes;
        return memory->host_tensor(staged, num_bytes, shape, Ort::TypeToTensorType<T>::type);
    }

    /// The way of one step on these rows.
    Way way(OrtRows& rows, const StepInput& input, bool want_logits) const {
        if (!memory) return {};
        const std::int64_t width = 5 + (input.want_topk ? 2 * top_k : 0) + (want_logits ? vocab_size : 0); // numbers of a prediction
        const auto numbers = static_cast<std::size_t>(input.rows * (input.slots + 1 + input.outputs * (1 + width)));
        return {dynamic_cast<DeviceRows&>(rows).staging(8 * numbers + alignment * (3 + outputs.size())), {}};
    }

    void bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const {
        const Shape shape{count, kv_heads, rows.capacity(), head_dim};
        const auto num_bytes = static_cast<std::size_t>(count * rows.row_bytes());
        for (std::size_t i = 0; i < past_names.size(); ++i) {
            unsigned char* data = rows.at(i, first);
            const Ort::Value kv = memory ? memory->tensor(data, num_bytes, shape, kv_type)
                                         : Ort::Value::CreateTensor(host, data, num_bytes, shape.data(), shape.size(), kv_type);
            rows.binding.BindInput(past_names[i].c_str(), kv);
            rows.binding.BindOutput(present_names[i].c_str(), kv);
        }
    }

    template <typename T>
    void bind_result(OrtRows& rows, Way& way, const std::string& name, std::vector<T>& values, const Shape& shape) const {
        std::size_t size = 1;
        for (const std::int64_t dimension : shape) size *= static_cast<std::size_t>(dimension);
        values.resize(size);
        rows.binding.BindOutput(name.c_str(), tensor(way, values, shape, true));
    }

    void bind_results(OrtRows& rows, Way& way, const StepInput& input, bool want_logits, StepOutput& output) const {
        for (const std::string& name : outputs) {
            const Shape shape{input.rows, input.outputs}, topk{input.rows, input.outputs, top_k};
            if (name == "token_ids") bind_result(rows, way, name, output.token_ids, shape);
            if (name == "confidence") bind_result(rows, way, name, output.confidence, shape);
            if (name == "margin") bind_result(rows, way, name, output.margin, shape);
            if (name == "entropy") bind_result(rows, way, name, output.entropy, shape);
            // What is not bound is not computed.
            if (name == "topk_ids" && input.want_topk) bind_result(rows, way, name, output.topk_ids, topk);
            if (name == "topk_logprobs" && input.want_topk) {
                bind_result(rows, way, name, output.topk_logprobs, topk);
                output.top_k = top_k;
            }
            if (name == "logits" && want_logits) bind_result(rows, way, name, output.logits, {input.rows, input.outputs, vocab_size});
        }
        if (!want_logits) output.logits.clear();
        if (!input.want_topk) output.top_k = 0;
    }

    void run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
        Scratch::Step step = scratch ? scratch->step(input.rows, input.slots, rows.capacity(), input.outputs) : Scratch::Step();
        const Shape layout{first, input.rows, rows.capacity(), want_logits ? 1 : 0, input.want_topk ? 1 : 0};
        // Another device gets a copy of a host tensor when it is bound, so rows in host memory must be bound at every step there, and inputs
        // always: binding is what sends them.
        if (rows.bound != layout || (!on_cpu && !memory)) {
            rows.binding.ClearBoundOutputs();
            rows.bound.clear(); // a binding that fails half-way stands for nothing
            bind_kv(rows, first, input.rows);
            rows.bound = layout;
        }
        Way sending = way(rows, input, want_logits);
        rows.binding.BindInput("input_ids", tensor(sending, input.input_ids, {input.rows, input.slots}, false));
        rows.binding.BindInput("kv_length", tensor(sending, input.kv_length, {input.rows}, false));
        rows.binding.BindInput("output_index", tensor(sending, input.output_index, {input.rows, input.outputs}, false));
        bind_results(rows, sending, input, want_logits, output);
        const auto begun = std::chrono::steady_clock::now();
        opened->session.Run(rows.options, rows.binding);
        run_time += (std::chrono::steady_clock::now() - begun).count();
        step.ran();
        for (const Way::Result& result : sending.results) std::memcpy(result.target, result.source, result.num_bytes);
    }

    /// Why KV rows cannot stay on the device, found by trying; nothing where they can. What is bound where the graph does not read it is copied
    /// when it is bound: a later step would read what was there then, and write that over what is there now.
    std::optional<std::string> why_not_there() {
        try {
            DeviceRows rows(memory, opened->session, past_names.size(), 1, kv_heads, head_dim * element_bytes);
            rows.reserve(2);
            StepInput input{1, 1, 1, {0}, {0}, {0}};
            StepOutput output;
            run(rows, 0, input, false, output);
            const std::vector<unsigned char> before = rows.fetch(*rows.save(0, 1));
            input.kv_length = {1};
            run(rows, 0, input, false, output);
            return misplaced(before, rows.fetch(*rows.save(0, 1)));
        } catch (const Ort::Exception& error) {
            if (is_lasting(error.what())) throw;
            return first_line(error);
        } catch (const DeviceLost&) {
            throw;
        } catch (const SessionError& error) {
            return error.what();
        }
    }

    std::unique_ptr<OrtRows> new_rows(std::int64_t num_rows) const {
        if (memory)
            return std::make_unique<DeviceRows>(memory, opened->session, past_names.size(), num_rows, kv_heads, head_dim * element_bytes);
        return std::make_unique<HostRows>(opened->session, past_names.size(), num_rows, kv_heads, head_dim * element_bytes);
    }

    /// Where KV rows lie, and what the log should know of where operators run.
    void settle(const std::optional<OrtPlace>& place, const std::string& provider, const OrtOptions& of_provider) {
        if (!on_cpu)
            if (const auto counts = mars::on_cpu(*opened, provider))
                if (const auto words = heavy_on_cpu(*counts, provider)) note(opened->on_log, LogLevel::warning, *words);
        if (!place) return;
        std::string why;
        try {
            memory = std::make_shared<OrtMemory>(
                opened, *place, [provider, of_provider](Ort::SessionOptions& options) { add_provider(options, provider, of_provider); },
                kv_type, element_bytes);
            const auto found = why_not_there();
            if (!found) {
                memory->sent = memory->fetched = 0;
                return;
            }
            why = *found;
        } catch (const Ort::Exception& error) {
            if (is_lasting(error.what())) throw;
            why = first_line(error);
        }
        memory = nullptr;
        note(opened->on_log, LogLevel::warning,
             "KV rows cannot stay in " + place->rows + " memory, so they cross at every step, which is slow: " + why);
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
        for (std::size_t i = 0; i < opened->session.GetInputCount(); ++i)
            check(opened->session.GetInputNameAllocated(i, allocator).get(), opened->session.GetInputTypeInfo(i));
        for (std::size_t i = 0; i < opened->session.GetOutputCount(); ++i)
            check(opened->session.GetOutputNameAllocated(i, allocator).get(), opened->session.GetOutputTypeInfo(i));
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
                       const OrtOptions& options, OnLog on_log, const std::optional<OrtPlace>& place)
    : graph_(std::make_unique<Graph>()) {
    const std::map<std::string, std::pair<ONNXTensorElementDataType, int>> kv_types{
        {"float32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4}}, {"float16", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2}}};
    const auto kv = kv_types.find(variant.kv_dtype);
    if (variant.kv_layout != "static" || kv == kv_types.end())
        throw SessionError("variant " + variant.name + ": KV layout " + variant.kv_layout + " in " + variant.kv_dtype +
                           " does not run on ONNX Runtime");
    if (threads && *threads < 1) throw SessionError("threads must be 1 or more, not " + std::to_string(*threads));
    init_ort();
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
    graph.on_cpu = provider == cpu_provider;
    const OrtParts parts = parted(options, graph.on_cpu, named.number);
    // Products of these add up in one order whatever the step's size, from two slots on; angles are computed many at a time.
    graph.is_firm = graph.on_cpu && (variant.precision == "float32" || variant.precision == "w8a8") && model.head_dim % 32 == 0;
    for (std::int64_t i = 0; i < model.num_layers; ++i)
        for (const char* kind : {".key", ".value"}) {
            graph.past_names.push_back("past_key_values." + std::to_string(i) + kind);
            graph.present_names.push_back("present." + std::to_string(i) + kind);
        }
    const std::filesystem::path opened_at = bundle.place(variant.file);
    const Headroom headroom;
    const bool has_arena = !graph.on_cpu || !headroom.is_limited();
    if (graph.on_cpu) {
        const std::int64_t weights = size_of(bundle, variant.weights.value_or(variant.file));
        require_session(headroom, model, weights, variant.precision, threads, has_begun());
        graph.scratch.emplace(model, variant, weights, has_arena);
    }
    try {
        graph.host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        graph.opened =
            open_graph({opened_at, provider, parts, threads, variant.accuracy_level.value_or(fastest_level), std::move(on_log), has_arena});
        if (graph.on_cpu && variant.weights && bundle.held)
            graph.weights = Watched(bundle.place(*variant.weights), bundle.path / *variant.weights);
        graph.check_signature();
        graph.settle(place ? place : place_of(provider, parts.of_provider), provider, parts.of_provider);
    } catch (const Ort::Exception& error) {
        const std::string what = graph.file.string() + ": ONNX Runtime " + version() + " cannot load the graph: " +
                                 replaced(first_line(error), opened_at.parent_path().string(), bundle.path.string());
        if (is_shortage(error)) throw MemoryError(what + open_advice);
        throw SessionError(what);
    }
}

OrtBackend::~OrtBackend() = default;

const std::vector<std::string>& OrtBackend::outputs() const { return graph_->outputs; }

std::int64_t OrtBackend::max_capacity() const { return graph_->max_capacity; }

std::optional<std::int64_t> OrtBackend::firm_slots() const { return graph_->is_firm ? std::optional<std::int64_t>(2) : std::nullopt; }

std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) { return graph_->new_rows(num_rows); }

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& rows = dynamic_cast<OrtRows&>(cache);
    Graph& graph = *graph_;
    output.outputs = input.outputs;
    output.vocab_size = graph.vocab_size;
    graph.weights.check();
    const auto what = [&input](const char* how) {
        return how + (" a step of " + std::to_string(input.rows)) + " x " + std::to_string(input.slots) + " slots";
    };
    try {
        graph.run(rows, first, input, want_logits, output);
    } catch (const Ort::Exception& error) {
        if (rows.is_interrupted) throw Interrupted("the answer was ended inside a step");
        const std::string why = what("ONNX Runtime failed in") + ": " + first_line(error);
        if (is_lasting(error.what())) throw DeviceLost(why + lost_advice);
        if (is_shortage(error)) throw MemoryError(why + step_advice);
        throw DeviceError(why);
    } catch (const std::bad_alloc&) {
        throw MemoryError(what("no memory for inputs and results of") + step_advice);
    }
}

bool OrtBackend::is_on_device() const { return graph_->memory != nullptr; }

OrtTraffic OrtBackend::traffic() const { return graph_->memory ? OrtTraffic{graph_->memory->sent, graph_->memory->fetched} : OrtTraffic{}; }

double OrtBackend::run_seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::duration(graph_->run_time)).count();
}

std::vector<std::string> OrtBackend::devices() {
    init_ort();
    return Ort::GetAvailableProviders();
}

std::string OrtBackend::version() { return OrtGetApiBase()->GetVersionString(); }

} // namespace mars
