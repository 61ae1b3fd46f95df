#include "device/ort/backend.hpp"

#include <chrono>
#include <new>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "device/name.hpp"
#include "device/ort/api.hpp"
#include "device/ort/open.hpp"
#include "device/ort/products.hpp"
#include "device/ort/step.hpp"
#include "log.hpp"
#include "machine.hpp"

namespace mars {

namespace {

constexpr std::int64_t fastest_level = 4; // of products with int4 and int8 weights: activations in 8-bit blocks
constexpr const char* step_advice = "; not enough memory: run fewer rows at once, shorten the prompt, or free memory";
constexpr const char* open_advice = "; not enough memory: use a model of fewer or smaller weights, or free memory";

/// Throws MemoryError if a variant's files are larger than the free memory, because the system would kill the process.
void check_memory(const Bundle& bundle, const Variant& variant) {
    std::int64_t num_bytes = 0;
    for (const FileEntry& entry : bundle.manifest.files)
        if (entry.path == variant.file || entry.path == variant.weights) num_bytes += entry.size;
    const auto free = available_memory();
    if (free && num_bytes > *free)
        throw MemoryError((bundle.path / variant.file).string() + ": its " + std::to_string(num_bytes / 1'000'000) +
                          " MB are more than the " + std::to_string(*free / 1'000'000) + " MB of free memory" + open_advice);
}

/// What the graph must look like. Throws SessionError for variants that ONNX Runtime does not run.
OrtSignature signature_of(const Variant& variant, const ModelInfo& model) {
    const bool is_half = variant.kv_dtype == "float16";
    if (variant.kv_layout != "static" || (!is_half && variant.kv_dtype != "float32"))
        throw SessionError("variant " + variant.name + ": KV layout " + variant.kv_layout + " in " + variant.kv_dtype +
                           " does not run on ONNX Runtime");
    OrtSignature wanted;
    wanted.outputs = variant.outputs;
    wanted.vocab_size = model.vocab_size;
    wanted.kv_heads = model.num_kv_heads;
    wanted.head_dim = model.head_dim;
    wanted.kv_type = is_half ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    for (std::int64_t i = 0; i < model.num_layers; ++i)
        for (const char* kind : {".key", ".value"}) {
            wanted.past_names.push_back("past_key_values." + std::to_string(i) + kind);
            wanted.present_names.push_back("present." + std::to_string(i) + kind);
        }
    return wanted;
}

/// Log large operators that the provider leaves to the CPU; in strict mode they are an error.
void check_operators(const OrtGraph& graph, const std::string& provider, const OrtSettings& settings, const std::string& file) {
    const auto large = large_on_cpu(graph, provider);
    if (!large && settings.strict)
        throw SessionError("strict needs a libmars that was built with headers of ONNX Runtime 1.24 or newer (docs/cpp.md)");
    if (!large || large->empty()) return;
    const std::string text = file + ": " + words_on_cpu(*large, provider);
    if (settings.strict) throw SessionError(text);
    note(graph.on_log, LogLevel::warning, text);
}

[[noreturn]] void throw_load_error(const Ort::Exception& error, const std::string& file) {
    const std::string why = first_line(error);
    if (is_lasting(error.what())) throw DeviceLost(file + ": " + why + lost_advice);
    const std::string what = file + ": ONNX Runtime " + OrtBackend::version() + " cannot load the graph: " + why;
    if (is_shortage(error)) throw MemoryError(what + open_advice);
    throw SessionError(what);
}

} // namespace

OrtBackend::OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings,
                       std::shared_ptr<RowMemory> memory)
    : graph_((init_ort(), std::make_unique<OrtStep>())) {
    if (settings.threads && *settings.threads < 1)
        throw SessionError("threads must be 1 or more, not " + std::to_string(*settings.threads));
    const DeviceName name = DeviceName::of(device);
    const std::string provider = provider_of(name.kind);
    const bool is_on_cpu = provider == cpu_provider, is_cuda = provider == cuda_provider || provider == cuda_plugin;
    const bool is_w8a8 = variant.precision == "w8a8";
    const ModelInfo& model = bundle.manifest.model;
    const OrtParts options = parted(settings.options, is_on_cpu, name.number);
    OrtStep& graph = *graph_;
    graph.file = bundle.path / variant.file;
    graph.max_capacity = model.context_length;
    graph.signature = signature_of(variant, model);
    graph.element_bytes = graph.signature.kv_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 4;
    // Their products have one order of summation for all steps of two or more slots; angles are computed in blocks.
    graph.is_firm = is_on_cpu && (variant.precision == "float32" || is_w8a8) && model.head_dim % 32 == 0;
    if (is_cuda) check_cuda_version(version());
    check_memory(bundle, variant);
    try {
        graph.opened = open_graph({graph.file, provider, options, settings.threads, variant.accuracy_level.value_or(fastest_level),
                                   settings.on_log, settings.cuda_stream});
        if (is_on_cpu && is_w8a8) require_exact_products(graph.opened->env, options.entries);
        graph.top_k = check_signature(graph.opened->session, graph.file, graph.signature);
        if (is_cuda && !memory) memory = cuda_memory(name.ordinal());
        graph.are_rows_bound_once = is_on_cpu || memory != nullptr;
        if (memory) graph.memory = std::move(memory);
        graph.host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        graph.rows_info = {graph.memory->name(), OrtDeviceAllocator, graph.memory->index(), OrtMemTypeDefault};
        if (!is_on_cpu) check_operators(*graph.opened, provider, settings, graph.file.string());
    } catch (const Ort::Exception& error) {
        throw_load_error(error, graph.file.string());
    }
}

OrtBackend::~OrtBackend() = default;

const std::vector<std::string>& OrtBackend::outputs() const { return graph_->signature.outputs; }
std::int64_t OrtBackend::max_capacity() const { return graph_->max_capacity; }
std::optional<std::int64_t> OrtBackend::firm_slots() const { return graph_->is_firm ? std::optional<std::int64_t>(2) : std::nullopt; }
std::optional<std::int64_t> OrtBackend::free_memory() const { return graph_->memory->available(); }
std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) { return graph_->new_rows(num_rows); }

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& rows = dynamic_cast<OrtRows&>(cache);
    OrtStep& graph = *graph_;
    output.outputs = input.outputs;
    output.vocab_size = graph.signature.vocab_size;
    const auto what = [&input](const char* how) {
        return how + (" a step of " + std::to_string(input.rows)) + " x " + std::to_string(input.slots) + " slots";
    };
    try {
        graph.run(rows, first, input, want_logits, output);
    } catch (const Ort::Exception& error) {
        const std::string why = what("ONNX Runtime failed in") + ": " + first_line(error);
        if (is_lasting(error.what())) throw DeviceLost(why + lost_advice);
        if (is_shortage(error)) throw MemoryError(why + step_advice);
        throw DeviceError(why);
    } catch (const std::bad_alloc&) {
        throw MemoryError(what("no memory for inputs and results of") + step_advice);
    }
}

double OrtBackend::run_seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::duration(graph_->run_time)).count();
}

std::vector<std::string> OrtBackend::devices() {
    init_ort();
    return Ort::GetAvailableProviders();
}

std::string OrtBackend::version() { return ort_base().GetVersionString(); }

} // namespace mars
