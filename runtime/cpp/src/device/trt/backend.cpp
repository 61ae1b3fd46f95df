#include "device/trt/backend.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include <mars/errors.hpp>

#include "joined.hpp"

namespace mars {

namespace {

constexpr std::size_t max_contexts = 32;       // also bounded by a share of the memory that is free when an engine is opened
constexpr std::int64_t context_share = 8;      // contexts take at most this fraction of it
constexpr std::size_t context_size = 32 << 20; // bytes that must be free for one; its real size is known only afterwards

/// Keep the wanted rows and columns of `values` [?, given, inner], moved to the front.
template <typename T>
void keep(std::vector<T>& values, std::int64_t given, std::int64_t rows, std::int64_t wanted, std::int64_t inner) {
    if (values.empty()) return;
    for (std::int64_t row = 1; row < rows && given != wanted; ++row)
        std::copy_n(values.begin() + row * given * inner, wanted * inner, values.begin() + row * wanted * inner);
    values.resize(static_cast<std::size_t>(rows * wanted * inner));
}

std::string sizes_of(const ShapeRange& range) {
    const auto extent = [](const Extent& size) { return std::to_string(size.min) + "-" + std::to_string(size.max); };
    return range.name + ": " + extent(range.batch) + " x " + extent(range.slots);
}

[[noreturn]] void disagree(std::vector<std::string> tensors) {
    tensors.resize(std::min(tensors.size(), std::size_t{6}));
    throw SessionError("the engine and the manifest disagree about " + joined(tensors) + "; build the engine again");
}

} // namespace

TrtBackend::TrtBackend(const Bundle& bundle, const Variant& variant, const EngineOptions& options)
    : outputs_(variant.outputs), info_(variant.engine.value()), model_(bundle.manifest.model), capacity_(variant.capacity.value()),
      in_place_(variant.kv_layout == "in-place"), is_exact_(variant.is_static()),
      pool_(std::make_shared<KvPool>(options.gpu, options.stream)) {
    const KvPool::Turn turn(*pool_);
    engine_.emplace(bundle, variant, options.on_log);
    const std::int64_t rows = info_.max_rows(), slots = info_.max_slots(), outputs = info_.max_outputs();
    // An engine with fixed shapes pads steps with extra rows and slots, which write to the last `slots` entries of a
    // row. In other engines the rows of a batch share the widest row's slots, so a row near its end writes further.
    std::int64_t spare = is_exact_ ? slots : 0;
    if (!is_exact_ && rows > 1)
        for (const ShapeRange& range : info_.ranges)
            if (range.name == "decode") spare = std::max(spare, range.slots.max - 1);
    max_capacity_ = std::min(model_.context_length, capacity_ - spare);
    if (max_capacity_ < 1) throw SessionError("variant " + variant.name + ": its capacity is less than one step; build it again");
    suffixes_ = model_.kv_suffixes();
    const std::int64_t item = variant.kv_dtype == "float32" ? 4 : 2;
    check_signature(variant.kv_dtype);
    std::map<std::string, std::int64_t> widths;
    for (const std::string& name : outputs_) widths[name] = 1;
    for (const EngineTensor& tensor : engine_->tensors())
        if (is_wide(tensor.name)) widths[tensor.name] = tensor.shape.back();
    pool_->layout = {suffixes_.size(), model_.num_kv_heads, model_.head_dim * item, [capacity = capacity_](std::int64_t wanted) {
                         if (wanted > capacity)
                             throw SessionError("a step would write entry " + std::to_string(wanted) + " of a row, this engine holds " +
                                                std::to_string(capacity) + "; shorten the prompt, or build with a larger --capacity");
                         return capacity;
                     }};
    // As many rows as any request can have; padding rows come after the last.
    pool_->max_idle = pool_->laid_out(rows + (is_exact_ ? rows - 1 : 0), capacity_).num_bytes;
    pool_->forget = [this](Address memory) { forget(memory); };
    shape_bucket_.emplace(info_, capacity_, is_exact_);
    io_ = StepIO(pool_->device, rows, slots, outputs, std::move(widths));
    if (!in_place_) {
        const auto entry = bytes({pool_->layout.entry_bytes}), gap = alignment / std::gcd(alignment, entry) - 1;
        const auto tensors = static_cast<std::int64_t>(suffixes_.size()),
                   most = rows * model_.num_kv_heads + static_cast<std::int64_t>(gap);
        fresh_ = pool_->device.allocate(bytes({tensors, most, slots, pool_->layout.entry_bytes}));
    }
    scratch_ = pool_->device.allocate(engine_->scratch_bytes());
    if (const auto free = pool_->device.free_memory()) most_context_bytes_ = *free / context_share;
    add_common_contexts();
}

/// Destroy graphs before their contexts, contexts before the engine. KV memory goes with the last cache.
TrtBackend::~TrtBackend() {
    std::optional<KvPool::Turn> turn;
    try {
        turn.emplace(*pool_);
    } catch (const SessionError&) { // the GPU has failed; its memory goes with the process
    }
    pool_->forget = [](Address) {}; // caches may outlive this
    steps_.clear();
    engine_.reset();
}

/// Steps that are bound to this memory must not run again.
void TrtBackend::forget(Address memory) {
    for (Step& step : steps_) {
        if (step.shape.memory != memory) continue;
        step.graph.reset();
        step.shape.rows = -1;
    }
}

/// Check the engine's tensors against the manifest: names, types, sizes, and outputs that write their inputs' memory.
void TrtBackend::check_signature(const std::string& kv_dtype) const {
    struct Expected {
        std::string dtype, alias;
        std::vector<std::int64_t> shape; // -1: any
    };
    std::map<std::string, Expected> wanted{{"kv_length", {"int64", "", {-1}}}};
    for (const char* name : {"input_ids", "output_index"}) wanted[name] = {"int64", "", {-1, -1}};
    for (const std::string& name : outputs_) {
        wanted[name] = {name == "token_ids" || name == "topk_ids" ? "int64" : "float32", "", {-1, -1}};
        if (is_wide(name)) wanted[name].shape.push_back(name == "logits" ? model_.vocab_size : -1);
    }
    for (const std::string& suffix : suffixes_) {
        const std::string past = "past_key_values." + suffix;
        wanted[past] = {kv_dtype, "", {-1, model_.num_kv_heads, capacity_, model_.head_dim}};
        wanted["present." + suffix] = {kv_dtype, in_place_ ? past : "", {-1, model_.num_kv_heads, -1, model_.head_dim}};
    }
    std::set<std::string> odd;
    std::int64_t most = 0; // of a top-k
    for (const EngineTensor& tensor : engine_->tensors()) {
        const auto at = wanted.find(tensor.name);
        if (at == wanted.end()) {
            odd.insert(tensor.name);
            continue;
        }
        const auto& [dtype, alias, shape] = at->second;
        const auto fits = [](std::int64_t has, std::int64_t wants) { return has < 0 || wants < 0 || has == wants; };
        const bool same = std::equal(tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(), fits);
        if (tensor.dtype != dtype || !same || (!tensor.alias.empty() && tensor.alias != alias)) odd.insert(tensor.name);
        if (same && is_wide(tensor.name)) {
            const std::int64_t width = tensor.shape.back();
            const bool is_top_k = tensor.name != "logits";
            if (width < 1 || width > model_.vocab_size || (is_top_k && most > 0 && width != most)) odd.insert(tensor.name);
            if (is_top_k) most = width;
        }
        wanted.erase(at);
    }
    for (const auto& missing : wanted) odd.insert(missing.first);
    if (!odd.empty()) disagree({odd.begin(), odd.end()});
}

std::size_t TrtBackend::num_graphs() const {
    return static_cast<std::size_t>(std::count_if(steps_.begin(), steps_.end(), [](const Step& step) { return step.graph != nullptr; }));
}

std::unique_ptr<Cache> TrtBackend::new_cache(std::int64_t num_rows) {
    if (num_rows > info_.max_rows())
        throw SessionError(std::to_string(num_rows) + " rows, but this engine was built for at most " + std::to_string(info_.max_rows()) +
                           "; build it again with --batch " + std::to_string(num_rows));
    const std::size_t row_bytes = bytes({model_.num_kv_heads, capacity_, pool_->layout.entry_bytes});
    if (num_rows > 1 && row_bytes % alignment != 0)
        throw SessionError(std::to_string(num_rows) + " rows, but with a capacity of " + std::to_string(capacity_) +
                           " rows of this engine do not begin at multiples of " + std::to_string(alignment) +
                           " bytes; build it again with a --capacity that is a multiple of 64");
    // With fixed shapes, a step that begins at the last row touches all the engine's rows after it.
    return std::make_unique<GpuCache>(pool_, is_exact_ ? num_rows - 1 + info_.max_rows() : num_rows);
}

void TrtBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    const KvMemory& memory = dynamic_cast<GpuCache&>(cache).memory();
    const std::optional<StepInput> filled = shape_bucket_->filled(input);
    const StepInput& fed = filled ? *filled : input;
    output.outputs = input.outputs;
    output.vocab_size = model_.vocab_size;
    if (!want_logits) output.logits.clear();
    {
        const KvPool::Turn turn(*pool_);
        try {
            Step& step = step_for(memory, first, fed);
            io_.send(pool_->device, fed);
            output.is_prepared = step.runs > (is_decode(step.shape.range) && !step.is_refused ? 1 : 0);
            run(step);
            if (!in_place_) place(memory, step.shape, input.kv_length);
            io_.fetch(pool_->device, fed.rows, fed.outputs, want_logits, input.want_topk, output);
            if (step.runs == 1) engine_->keep_kernels();
        } catch (...) {
            pool_->device.settle(); // its copies still use memory that the next step writes
            throw;
        }
    }
    keep(output.token_ids, fed.outputs, input.rows, input.outputs, 1);
    for (auto* values : {&output.confidence, &output.margin, &output.entropy}) keep(*values, fed.outputs, input.rows, input.outputs, 1);
    keep(output.topk_ids, fed.outputs, input.rows, input.outputs, output.top_k);
    keep(output.topk_logprobs, fed.outputs, input.rows, input.outputs, output.top_k);
    keep(output.logits, fed.outputs, input.rows, input.outputs, model_.vocab_size);
}

/// Create a context. The oldest ones are destroyed if there are too many or they take too much memory.
std::list<TrtBackend::Step>::iterator TrtBackend::add_context(std::size_t range, std::int64_t slots, std::int64_t outputs) {
    Device& device = pool_->device;
    device.require(context_size);
    const auto before = device.free_memory();
    Step step{engine_->new_context(range, scratch_, device.stream()), {range, slots, outputs}, 0, 0, {}, false};
    if (before) step.num_bytes = std::max(std::int64_t{0}, *before - device.free_memory().value_or(*before));
    context_bytes_ += step.num_bytes;
    steps_.push_front(std::move(step));
    while (steps_.size() > 1 && (steps_.size() > max_contexts || context_bytes_ > most_context_bytes_)) {
        context_bytes_ -= steps_.back().num_bytes;
        steps_.pop_back();
    }
    return steps_.begin();
}

/// Create the contexts of one token, of the engine's optimal size, of the largest steps and of prompts in advance, not
/// during an answer.
void TrtBackend::add_common_contexts() {
    for (std::size_t range = 0; range < info_.ranges.size(); ++range) {
        const ShapeRange& sizes = info_.ranges[range];
        if (!is_decode(range)) {
            add_context(range, 0, 0);
            continue;
        }
        std::set<std::pair<std::int64_t, std::int64_t>> common{
            {sizes.slots.min, sizes.outputs.min}, {sizes.slots.opt, sizes.outputs.opt}, {sizes.slots.max, sizes.outputs.max}};
        for (const auto& [slots, outputs] : common) add_context(range, slots, outputs);
    }
}

/// The context for this shape, bound to it.
TrtBackend::Step& TrtBackend::step_for(const KvMemory& memory, std::int64_t first, const StepInput& input) {
    const auto range = info_.range_for(input.rows, input.slots, input.outputs);
    if (!range)
        throw SessionError("a step of " + std::to_string(input.rows) + " x " + std::to_string(input.slots) + " slots with " +
                           std::to_string(input.outputs) + " predictions is beyond this engine (" + joined(info_.ranges, "; ", sizes_of) +
                           "; at most " + std::to_string(info_.max_outputs()) +
                           " predictions); build one with a larger --batch, --prefill or --block");
    const Shape shape{*range, input.slots, input.outputs, memory.addresses.front(), first, input.rows};
    const auto fits = [&](const Step& step) {
        const bool is_size = step.shape.slots == input.slots && step.shape.outputs == input.outputs;
        return step.shape.range == *range && (is_size || !is_decode(*range));
    };
    auto at = std::find_if(steps_.begin(), steps_.end(), fits);
    if (at == steps_.end()) at = add_context(*range, input.slots, input.outputs);
    steps_.splice(steps_.begin(), steps_, at);
    Step& step = steps_.front();
    if (step.shape.key() != shape.key()) {
        step.graph.reset();
        step.runs = 0;
        step.is_refused = false;
        step.shape = shape;
        bind(step, memory);
    }
    return step;
}

/// Set the context's shapes and addresses. Past and present of a KV tensor share one address.
void TrtBackend::bind(Step& step, const KvMemory& memory) {
    const Shape& shape = step.shape;
    std::vector<std::string> refused;
    const auto shaped = [&](const std::string& name, const std::vector<std::int64_t>& size) {
        if (!step.context->setInputShape(name.c_str(), dims_of(size))) refused.push_back(name);
    };
    const auto addressed = [&](const std::string& name, Address address) {
        if (!step.context->setTensorAddress(name.c_str(), reinterpret_cast<void*>(address))) refused.push_back(name);
    };
    shaped("input_ids", {shape.rows, shape.slots});
    shaped("kv_length", {shape.rows});
    shaped("output_index", {shape.rows, shape.outputs});
    for (const auto& [name, address] : io_.addresses(shape.rows, shape.outputs)) addressed(name, address);
    for (std::size_t i = 0; i < suffixes_.size(); ++i) {
        const Address here = memory.addresses[i] + static_cast<std::size_t>(shape.first) * memory.row_bytes;
        shaped("past_key_values." + suffixes_[i], {shape.rows, model_.num_kv_heads, capacity_, model_.head_dim});
        addressed("past_key_values." + suffixes_[i], here);
        if (in_place_) addressed("present." + suffixes_[i], here);
    }
    if (!in_place_) {
        const Runs fresh = fresh_runs(shape);
        for (std::size_t i = 0; i < suffixes_.size(); ++i)
            addressed("present." + suffixes_[i], fresh.address + i * fresh.pitch * fresh.per_slice);
    }
    if (refused.empty()) return;
    step.shape.rows = -1; // not bound
    disagree(refused);
}

void TrtBackend::run(Step& step) {
    Device& device = pool_->device;
    const auto enqueue = [&] { return step.context->enqueueV3(static_cast<cudaStream_t>(device.stream())); };
    // TensorRT finishes preparing a context in its first run, so that run cannot be captured.
    if (is_decode(step.shape.range) && step.graph == nullptr && step.runs > 0 && !step.is_refused) {
        if (is_capturable(*step.context, device.stream())) step.graph = device.capture(enqueue);
        step.is_refused = step.graph == nullptr;
    }
    if (step.graph != nullptr) {
        device.launch(step.graph);
    } else if (!enqueue()) {
        device.synchronize(); // throws the GPU's own error if it has failed
        throw DeviceError("TensorRT failed in a step of " + std::to_string(step.shape.rows) + " x " + std::to_string(step.shape.slots) +
                          " slots: " + engine_->last_error());
    }
    ++step.runs;
}

/// Where a `appended` engine writes a step's new entries: the slots of each head, row and tensor.
Runs TrtBackend::fresh_runs(const Shape& shape) const {
    const std::size_t run = bytes({shape.slots, pool_->layout.entry_bytes});
    return {fresh_, run, per_slice(bytes({shape.rows, model_.num_kv_heads}), run)};
}

/// Copy a `appended` engine's new entries to each row's cursor: one copy a row for all tensors.
void TrtBackend::place(const KvMemory& memory, const Shape& shape, const std::vector<std::int64_t>& kv_length) {
    Runs fresh = fresh_runs(shape);
    for (std::size_t row = 0; row < kv_length.size(); ++row) {
        const Runs target = memory.runs(shape.first + static_cast<std::int64_t>(row), kv_length[row]);
        pool_->device.copy_runs(target, fresh, fresh.pitch, memory.kv_heads, memory.addresses.size());
        fresh.address += memory.kv_heads * fresh.pitch;
    }
}

} // namespace mars
