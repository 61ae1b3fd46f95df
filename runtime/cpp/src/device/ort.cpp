// ONNX Runtime through its C++ API: check the signature, bind, run.
#include "device/ort.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <new>
#include <tuple>

#include <mars/errors.hpp>

#include "bundle/held.hpp"
#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/ort_api.hpp"
#include "device/ort_graphs.hpp"
#include "device/ort_open.hpp"
#include "device/ort_step.hpp"
#include "log.hpp"

namespace mars {

namespace {

constexpr std::int64_t fastest_level = 4; // of products with int4 and int8 weights: activations in 8-bit blocks
constexpr int trials = 4;                 // of a step that is captured: seen, captured, and replayed with other inputs
constexpr const char* not_there = "a step's inputs or results are not all on the GPU";
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

struct OrtBackend::Graph : OrtStep {
    std::filesystem::path file;
    std::int64_t max_capacity = 0;
    bool is_firm = false;
    Watched weights; // ONNX Runtime has them mapped
    std::optional<OrtGraphs> graphs;
    std::optional<std::string> refusal; // why it captures none although it should

    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() {
        run_in(worker, [&] {
            graphs.reset();
            memory.reset();
            opened.reset();
        });
    }

    /// The step, filled up, as one launch; false where it is to run as it is.
    bool captured(OrtRows& rows, std::int64_t first, const StepInput& input, StepOutput& output) {
        const std::optional<StepInput> filled = graphs->filled(input);
        if (!filled) return false;
        try {
            rows.reserve(*std::max_element(filled->kv_length.begin(), filled->kv_length.end()) + filled->slots);
        } catch (const MemoryError&) { // there was room for what was asked for
            return false;
        }
        OrtGraphs::Key key{rows.capacity(), first, filled->rows, filled->slots, filled->outputs, filled->want_topk ? 1 : 0};
        for (std::size_t i = 0; i < signature.past_names.size(); ++i) key.push_back(reinterpret_cast<std::intptr_t>(rows.at(i, 0)));
        const std::shared_ptr<CapturedStep> step =
            graphs->find(key, [&](std::int64_t number) { return bound(rows, first, number, *filled); });
        if (!step) return false;
        if (rows.is_interrupted) throw Interrupted("the answer was ended before a step");
        step->write(*filled);
        if (!replay(*step)) return false;
        step->read(input.outputs, output);
        return true;
    }

    std::shared_ptr<CapturedStep> bound(OrtRows& rows, std::int64_t first, std::int64_t number, const StepInput& size) const {
        std::vector<StepResult> results;
        for (const std::string& name : signature.outputs) {
            const bool is_wide = name == "topk_ids" || name == "topk_logprobs";
            if (name != "logits" && (!is_wide || size.want_topk)) results.push_back({name, is_wide ? top_k : 1});
        }
        auto step = std::make_shared<CapturedStep>(memory, opened->session, number, size, results);
        bind_kv(step->binding, rows, first, size.rows);
        return step;
    }

    /// Where the provider fails to capture or replay a step nothing is replayed from then on, and the step is to run plainly.
    bool replay(CapturedStep& step) {
        try {
            compute(step.options, step.binding);
            ++step.runs;
            return true;
        } catch (const Ort::Exception& error) {
            if (is_lasting(error.what())) throw;
            give_up(std::string("a step could not be captured or replayed: ") + error.what());
            return false;
        }
    }

    void give_up(const std::string& why) {
        graphs->give_up(why);
        note(opened->on_log, LogLevel::warning, "steps are not captured: " + *graphs->reason());
    }

    /// Replay steps on rows of nobody, and capture no more where they do not say what plain steps say.
    void try_graphs() {
        constexpr std::int64_t vocab = 64;
        const auto replayed = new_rows(1), plain = new_rows(1);
        std::int64_t cursor = 0;
        for (const std::int64_t slots : graphs->sizes()) {
            for (int i = 0; i < trials; ++i) {
                StepInput input{1, slots, slots, {}, {cursor}, {}};
                for (std::int64_t slot = 0; slot < slots; ++slot) {
                    input.input_ids.push_back((cursor + slot) * 7 % vocab);
                    input.output_index.push_back(i % 2 == 0 ? slot : slots - 1 - slot); // every input differs from one to the next
                }
                StepOutput found, right;
                step(*replayed, 0, input, false, found);
                plain->reserve(cursor + slots);
                run(*plain, 0, input, false, right);
                if (!graphs->reason() && !graphs->agree(found, right))
                    give_up("a replayed step does not say what the same step says plainly");
                if (graphs->reason()) return;
                cursor += slots;
            }
        }
    }

    void step(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
        const bool may_be_captured = graphs && !want_logits && !graphs->reason();
        if (!may_be_captured || !captured(rows, first, input, output)) run(rows, first, input, want_logits, output);
    }

    /// Why KV rows cannot stay on the device, found by trying; nothing where they can. What is bound where the graph does not read it is copied
    /// when it is bound: a later step would read what was there then, and write that over what is there now.
    std::optional<std::string> why_not_there() {
        try {
            const auto owner = new_rows(1);
            auto& rows = dynamic_cast<DeviceRows&>(*owner);
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

    /// Load the graph, to capture steps where the options ask for it; without where ONNX Runtime refuses.
    void open(OrtRequest request) {
        if (asks_for_graphs(request.provider, request.options.of_provider)) {
            worker = Worker::shared();
            try {
                worker->run([&] { opened = open_graph(request); });
                return;
            } catch (const Ort::Exception& error) {
                refusal = first_line(error);
            }
            worker = nullptr;
            request.options.of_provider = without_graphs(request.options.of_provider);
        }
        opened = open_graph(request);
        if (refusal) note(opened->on_log, LogLevel::warning, "steps are not captured: " + *refusal);
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
                opened, *place,
                [provider, own = without_graphs(of_provider)](Ort::SessionOptions& options) { add_provider(options, provider, own); },
                signature.kv_type, element_bytes, worker);
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
    graph.max_capacity = model.context_length;
    OrtSignature& wanted = graph.signature;
    wanted.outputs = variant.outputs;
    wanted.vocab_size = model.vocab_size;
    wanted.kv_heads = model.num_kv_heads;
    wanted.head_dim = model.head_dim;
    std::tie(wanted.kv_type, graph.element_bytes) = kv->second;
    graph.on_cpu = provider == cpu_provider;
    const OrtParts parts = parted(options, graph.on_cpu, named.number);
    // Products of these add up in one order whatever the step's size, from two slots on; angles are computed many at a time.
    graph.is_firm = graph.on_cpu && (variant.precision == "float32" || variant.precision == "w8a8") && model.head_dim % 32 == 0;
    for (std::int64_t i = 0; i < model.num_layers; ++i)
        for (const char* kind : {".key", ".value"}) {
            wanted.past_names.push_back("past_key_values." + std::to_string(i) + kind);
            wanted.present_names.push_back("present." + std::to_string(i) + kind);
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
        graph.open({opened_at, provider, parts, threads, variant.accuracy_level.value_or(fastest_level), std::move(on_log), has_arena});
        if (graph.on_cpu && variant.weights && bundle.held)
            graph.weights = Watched(bundle.place(*variant.weights), bundle.path / *variant.weights);
        graph.top_k = check_signature(graph.opened->session, graph.file, wanted);
        run_in(graph.worker, [&] { graph.settle(place ? place : place_of(provider, parts.of_provider), provider, parts.of_provider); });
        if (!graph.worker) return;
        graph.graphs.emplace(bundle.manifest.block, variant.kv_dtype == "float16" ? 1e-2 : 1e-3);
        graph.worker->run([&] {
            if (!graph.memory) return graph.give_up(not_there);
            graph.try_graphs();
            graph.memory->sent = graph.memory->fetched = 0;
        });
    } catch (const Ort::Exception& error) {
        const std::string why = first_line(error);
        if (is_lasting(error.what())) throw DeviceLost(graph.file.string() + ": " + why + lost_advice);
        const std::string what = graph.file.string() + ": ONNX Runtime " + version() +
                                 " cannot load the graph: " + replaced(why, opened_at.parent_path().string(), bundle.path.string());
        if (is_shortage(error)) throw MemoryError(what + open_advice);
        throw SessionError(what);
    }
}

OrtBackend::~OrtBackend() = default;

const std::vector<std::string>& OrtBackend::outputs() const { return graph_->signature.outputs; }

std::int64_t OrtBackend::max_capacity() const { return graph_->max_capacity; }

std::optional<std::int64_t> OrtBackend::firm_slots() const { return graph_->is_firm ? std::optional<std::int64_t>(2) : std::nullopt; }

std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) { return graph_->new_rows(num_rows); }

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& rows = dynamic_cast<OrtRows&>(cache);
    Graph& graph = *graph_;
    output.outputs = input.outputs;
    output.vocab_size = graph.signature.vocab_size;
    graph.weights.check();
    const auto what = [&input](const char* how) {
        return how + (" a step of " + std::to_string(input.rows)) + " x " + std::to_string(input.slots) + " slots";
    };
    try {
        run_in(graph.worker, [&] { graph.step(rows, first, input, want_logits, output); });
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

std::size_t OrtBackend::num_graphs() const {
    return graph_->graphs ? graph_->worker->run([&] { return graph_->graphs->count(); }) : 0;
}

std::optional<std::string> OrtBackend::why_no_graphs() const {
    return graph_->graphs ? graph_->worker->run([&] { return graph_->graphs->reason(); }) : graph_->refusal;
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
