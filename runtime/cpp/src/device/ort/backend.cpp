#include "device/ort/backend.hpp"

#include <new>

#include <mars/errors.hpp>

#include "device/name.hpp"
#include "log.hpp"

namespace mars {

namespace {

using Shape = std::vector<std::int64_t>;

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

} // namespace

OrtBackend::OrtBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings)
    // ONNX Runtime's members call its interface even if they are empty, so it is loaded before they are made.
    : outputs_((init_ort(), variant.outputs)), suffixes_(bundle.manifest.model.kv_suffixes()), model_(bundle.manifest.model),
      kv_(model_, variant) {
    if (settings.threads && *settings.threads < 1)
        throw SessionError("threads must be 1 or more, not " + std::to_string(*settings.threads));
    const DeviceName name = DeviceName::of(device);
    const std::string provider = provider_of(name.kind);
    const bool is_on_cpu = provider == cpu_provider;
    OrtParts options = parted(settings.options, is_on_cpu, name.number);
    const std::filesystem::path file = bundle.path / variant.file;
    // Their products have one order of summation for all steps of two or more slots; angles are computed in blocks.
    is_firm_ = is_on_cpu && (variant.precision == "float32" || variant.is_integer()) && model_.head_dim % 32 == 0 &&
               (!model_.recurrent || model_.recurrent->heads % 4 == 0);
    are_rows_bound_once_ = is_on_cpu;
    check_memory(bundle, variant);
    if (model_.recurrent) check_recurrent(version());
    try {
        options.has_own_operators = is_on_cpu && variant.is_integer();
        if (options.has_own_operators) note(settings.on_log, LogLevel::info, variant.precision + " on " + kernel_instructions());
        open_graph(graph_, file, provider, options, settings, variant);
        const auto widths = check_signature(graph_.session, file, variant, model_);
        if (const auto at = widths.find("topk_ids"); at != widths.end()) top_k_ = at->second;
        host_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        rows_info_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    } catch (const Ort::Exception& error) {
        rethrow<SessionError>(error, file.string() + ": ONNX Runtime " + version() + " cannot load the graph", open_advice);
    }
}

std::unique_ptr<Cache> OrtBackend::new_cache(std::int64_t num_rows) {
    return std::make_unique<OrtRows>(graph_.session, suffixes_.size(), num_rows, kv_.heads, kv_.width * kv_.item, model_.recurrent);
}

void OrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    auto& rows = dynamic_cast<OrtRows&>(cache);
    try {
        run(rows, first, input, want_logits, output);
    } catch (const Ort::Exception& error) {
        if (input.interrupt && input.interrupt->is_due()) throw Interrupted();
        rethrow<DeviceError>(error, failed_step(input), step_advice);
    } catch (const std::bad_alloc&) {
        throw MemoryError(failed_step(input) + step_advice);
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
    const auto at = static_cast<std::size_t>(first);
    std::vector<std::int64_t> lengths;
    if (rows.states) {
        lengths = rows.states->begin(first, input.kv_length);
        rows.binding.BindInput("state_length", tensor(lengths, {input.rows}));
    }
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
    for (std::size_t i = 0; rows.states && i < input.kv_length.size(); ++i) // they have all tokens before the first output
        rows.states->lengths[at + i] = input.kv_length[i] + input.output_index[i * static_cast<std::size_t>(input.outputs)];
}

/// Bind rows first, first + 1, ... as the graph's past and present: KV entries, and states.
void OrtBackend::bind_kv(OrtRows& rows, std::int64_t first, std::int64_t count) const {
    const Shape shape = kv_.shape(count, rows.capacity());
    const auto num_bytes = static_cast<std::size_t>(count * rows.row_bytes());
    for (std::size_t i = 0; i < suffixes_.size(); ++i) {
        const Ort::Value kv = Ort::Value::CreateTensor(rows_info_, rows.at(i, first), num_bytes, shape.data(), shape.size(), kv_.type);
        rows.binding.BindInput(("past_key_values." + suffixes_[i]).c_str(), kv);
        rows.binding.BindOutput(("present." + suffixes_[i]).c_str(), kv);
    }
    if (!rows.states) return;
    for (const auto& [suffix, buffer] : rows.states->buffers) {
        Shape shape = buffer.shape;
        shape.insert(shape.begin(), count);
        const auto size = static_cast<std::size_t>(count * buffer.size);
        const Ort::Value state = Ort::Value::CreateTensor<float>(rows_info_, buffer.at(first), size, shape.data(), shape.size());
        rows.binding.BindInput(("past_key_values." + suffix).c_str(), state);
        rows.binding.BindOutput(("present." + suffix).c_str(), state);
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
