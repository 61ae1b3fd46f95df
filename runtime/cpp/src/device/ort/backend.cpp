#include "device/ort/backend.hpp"

#include <new>

#include <mars/errors.hpp>

#include "device/lost.hpp"
#include "device/name.hpp"
#include "log.hpp"
#include "machine.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t scale_bytes = 2;   // of an int8 entry
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

/// The type of KV entries. Throws SessionError for variants that ONNX Runtime does not run.
ONNXTensorElementDataType kv_type_of(const Variant& variant) {
    if (variant.kv_layout == "in-place" && variant.kv_dtype == "float32") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (variant.kv_layout == "in-place" && variant.kv_dtype == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    if (variant.kv_layout == "in-place" && variant.kv_dtype == "int8") return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    throw SessionError("variant " + variant.name + ": KV layout " + variant.kv_layout + " in " + variant.kv_dtype +
                       " does not run on ONNX Runtime");
}

/// Throw `error` as DeviceLost, MemoryError or else as `Other`. `what` failed; `advice` is for a lack of memory.
template <typename Other>
[[noreturn]] void rethrow(const Ort::Exception& error, const std::string& what, const char* advice) {
    const std::string words = what + ": " + first_line(error);
    if (is_lasting(error.what())) throw DeviceLost(words + lost_advice);
    if (is_shortage(error)) throw MemoryError(words + advice);
    throw Other(words);
}

} // namespace

OrtBackend::OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings,
                       std::shared_ptr<RowMemory> memory)
    // ONNX Runtime's members call its interface even if they are empty, so it is loaded before they are made.
    : outputs_((init_ort(), variant.outputs)), model_(bundle.manifest.model), kv_type_(kv_type_of(variant)), memory_(std::move(memory)) {
    if (settings.threads && *settings.threads < 1)
        throw SessionError("threads must be 1 or more, not " + std::to_string(*settings.threads));
    const DeviceName name = DeviceName::of(device);
    const std::string provider = provider_of(name.kind);
    const bool is_on_cpu = provider == cpu_provider, is_cuda = provider == cuda_provider;
    const bool is_w8a8 = variant.precision == "w8a8";
    if (kv_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 && !is_on_cpu)
        throw SessionError("variant " + variant.name + ": its int8 KV entries are for CPUs; export with --kv float");
    OrtParts options = parted(settings.options, is_on_cpu, name.number);
    const std::filesystem::path file = bundle.path / variant.file;
    // Their products have one order of summation for all steps of two or more slots; angles are computed in blocks.
    is_firm_ = is_on_cpu && (variant.precision == "float32" || is_w8a8) && model_.head_dim % 32 == 0;
    for (std::int64_t i = 0; i < model_.num_kv_layers(); ++i)
        for (const char* kind : {".key", ".value"}) {
            past_names_.push_back("past_key_values." + std::to_string(i) + kind);
            present_names_.push_back("present." + std::to_string(i) + kind);
        }
    if (is_cuda) check_cuda_version(version());
    check_memory(bundle, variant);
    try {
        options.has_own_operators = is_on_cpu && is_w8a8;
        if (options.has_own_operators) note(settings.on_log, LogLevel::info, "w8a8 on " + kernel_instructions());
        open_graph(graph_, file, provider, options, settings, variant.accuracy_level.value_or(fastest_level));
        check_signature(file);
        if (is_cuda && !memory_) memory_ = cuda_memory(name.ordinal());
        are_rows_bound_once_ = is_on_cpu || memory_ != nullptr;
        if (!memory_) memory_ = host_memory();
        host_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        rows_info_ = {memory_->name(), OrtDeviceAllocator, memory_->index(), OrtMemTypeDefault};
    } catch (const Ort::Exception& error) {
        rethrow<SessionError>(error, file.string() + ": ONNX Runtime " + version() + " cannot load the graph", open_advice);
    }
}

std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) {
    const bool is_int8 = kv_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    const std::int64_t item = is_int8 ? 1 : kv_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 4;
    return std::make_unique<OrtRows>(memory_, graph_.session, past_names_.size(), num_rows, model_.num_kv_heads, entry_width() * item);
}

std::int64_t OrtBackend::entry_width() const {
    return model_.head_dim + (kv_type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? scale_bytes : 0);
}

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& rows = dynamic_cast<OrtRows&>(cache);
    const auto what = [&input](const char* how) {
        return how + (" a step of " + std::to_string(input.rows)) + " x " + std::to_string(input.slots) + " slots";
    };
    try {
        run(rows, first, input, want_logits, output);
    } catch (const Ort::Exception& error) {
        if (input.interrupt && input.interrupt->is_due()) throw Interrupted();
        rethrow<DeviceError>(error, what("ONNX Runtime failed in"), step_advice);
    } catch (const std::bad_alloc&) {
        throw MemoryError(what("no memory for inputs and results of") + step_advice);
    }
}

void OrtBackend::run(OrtRows& rows, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    const Shape layout{first, input.rows, rows.capacity(), want_logits ? 1 : 0, input.want_topk ? 1 : 0};
    if (rows.bound != layout || !are_rows_bound_once_) {
        rows.binding.ClearBoundOutputs();
        rows.bound.clear(); // a failed binding must not count as bound
        bind_kv(rows, first, input.rows);
        rows.bound = layout;
    }
    rows.binding.BindInput("input_ids", tensor(input.input_ids, {input.rows, input.slots}));
    rows.binding.BindInput("kv_length", tensor(input.kv_length, {input.rows}));
    rows.binding.BindInput("output_index", tensor(input.output_index, {input.rows, input.outputs}));
    bind_results(rows, input, want_logits, output);
    const auto begun = std::chrono::steady_clock::now();
    Ort::RunOptions options;
    struct Watched {
        Interrupt* interrupt;
        ~Watched() {
            if (interrupt != nullptr) interrupt->set_stop(nullptr);
        }
    } watched{input.interrupt.get()};
    if (input.interrupt) input.interrupt->set_stop([&options] { options.SetTerminate(); });
    graph_.session.Run(options, rows.binding);
    run_time_ += (std::chrono::steady_clock::now() - begun).count();
}

/// Bind rows first, first + 1, ... as the graph's past and present.
void OrtBackend::bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const {
    const Shape shape{count, model_.num_kv_heads, rows.capacity(), entry_width()};
    const auto num_bytes = static_cast<std::size_t>(count * rows.row_bytes());
    for (std::size_t i = 0; i < past_names_.size(); ++i) {
        const Ort::Value kv = Ort::Value::CreateTensor(rows_info_, rows.at(i, first), num_bytes, shape.data(), shape.size(), kv_type_);
        rows.binding.BindInput(past_names_[i].c_str(), kv);
        rows.binding.BindOutput(present_names_[i].c_str(), kv);
    }
}

/// Bind the wanted outputs; outputs that are not bound are not computed.
void OrtBackend::bind_results(OrtRows& rows, const StepInput& input, bool want_logits, StepOutput& output) const {
    output.outputs = input.outputs + model_.mtp_drafts;
    output.mtp_drafts = model_.mtp_drafts;
    output.vocab_size = model_.vocab_size;
    output.top_k = input.want_topk ? top_k_ : 0;
    if (!want_logits) output.logits.clear();
    const auto bind = [&](const std::string& name, auto& values, std::int64_t width) {
        Shape shape{input.rows, output.outputs};
        if (width > 0) shape.push_back(width);
        values.resize(static_cast<std::size_t>(input.rows * output.outputs * std::max(width, std::int64_t{1})));
        rows.binding.BindOutput(name.c_str(), tensor(values, shape));
    };
    for (const std::string& name : outputs_) {
        if (name == "token_ids") bind(name, output.token_ids, 0);
        if (name == "confidence") bind(name, output.confidence, 0);
        if (name == "margin") bind(name, output.margin, 0);
        if (name == "entropy") bind(name, output.entropy, 0);
        if (name == "topk_ids" && input.want_topk) bind(name, output.topk_ids, top_k_);
        if (name == "topk_logprobs" && input.want_topk) bind(name, output.topk_logprobs, top_k_);
        if (name == "logits" && want_logits) bind(name, output.logits, model_.vocab_size);
    }
}

template <typename T>
Ort::Value OrtBackend::tensor(const std::vector<T>& values, const Shape& shape) const {
    // ONNX Runtime writes to outputs only; its API has no const tensors.
    return Ort::Value::CreateTensor<T>(host_, const_cast<T*>(values.data()), values.size(), shape.data(), shape.size());
}

std::vector<std::string> OrtBackend::devices() {
    init_ort();
    return Ort::GetAvailableProviders();
}

std::string OrtBackend::version() { return ort_base().GetVersionString(); }

} // namespace mars
