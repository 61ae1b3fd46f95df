#include "device/ort/cuda_backend.hpp"

#include <algorithm>

#include <mars/errors.hpp>

#include "device/name.hpp"
#include "device/ort/backend.hpp"
#include "device/shape_bucket.hpp"
#include "log.hpp"

namespace mars {

namespace {

constexpr std::int64_t chunks[] = {32, 64, 128, 256, 512}; // slots of steps that are wider than a decode step
constexpr std::int64_t min_capacity = 512;
constexpr std::int64_t multiple = 8;                                       // of the slots of a decode step
constexpr std::size_t max_shapes = 80;                                     // bound shapes
constexpr std::int64_t max_graphs = 64;                                    // of them captured: this interface cannot release one
constexpr const char* graphs = "enable_cuda_graph";                        // an option of the provider
constexpr const char* no_capture = "cannot use the graph capture feature"; // ONNX Runtime, of a graph that is partly on the CPU

std::int64_t up(std::int64_t number, std::int64_t factor) { return (number + factor - 1) / factor * factor; }

std::int64_t power_of_two(std::int64_t least) {
    std::int64_t power = 1;
    while (power < least) power *= 2;
    return power;
}

/// Powers of two up to `context`, with room for the padding of a decode step: a new capacity is captured again.
std::int64_t capacity_for(std::int64_t capacity, std::int64_t slots, std::int64_t context) {
    const std::int64_t needed = std::max(min_capacity, capacity + slots);
    return std::max(needed, std::min(up(context + slots, min_capacity), power_of_two(needed)));
}

/// Options of a run that leaves waiting for the stream to us.
Ort::RunOptions run_options(std::int64_t graph_id) {
    Ort::RunOptions options;
    options.AddConfigEntry("gpu_graph_id", std::to_string(graph_id).c_str());
    options.AddConfigEntry("disable_synchronize_execution_providers", "1");
    return options;
}

} // namespace

CudaBackend::CudaBackend(const Bundle& bundle, const Variant& variant, const std::string& device, const OrtSettings& settings)
    // ONNX Runtime's members call its interface even if they are empty, so it is loaded before they are made.
    : outputs_((init_ort(), variant.outputs)), suffixes_(bundle.manifest.model.kv_suffixes()), model_(bundle.manifest.model),
      kv_(model_, variant), decode_slots_(up(2 * bundle.manifest.block - 1, multiple)), sizes_{decode_slots_} {
    for (const std::int64_t size : chunks)
        if (size > decode_slots_) sizes_.insert(size);
    const DeviceName name = DeviceName::of(device);
    provider_of(name.kind); // throws if there is none
    check_cuda_version(OrtBackend::version());
    OrtParts options = parted(settings.options, false, name.number);
    // Other graphs have a Split whose sizes ONNX Runtime copies from host memory that it frees after the run: a replay would
    // read other bytes.
    options.of_provider = cuda_options(std::move(options.of_provider), kv_.is_flat);
    try {
        load_cuda(options.of_provider);
        const auto number = options.of_provider.find("device_id");
        pool_ = std::make_shared<KvPool>(number == options.of_provider.end() ? 0 : std::stoi(number->second), settings.cuda_stream);
        open(bundle, variant, options, settings);
    } catch (const Ort::Exception& error) {
        const std::string file = (bundle.path / variant.file).string();
        rethrow<SessionError>(error, file + ": ONNX Runtime " + OrtBackend::version() + " cannot load the graph", open_advice);
    }
    pool_->layout = {
        suffixes_.size(), kv_.heads, kv_.width * kv_.item,
        [slots = decode_slots_, context = model_.context_length](std::int64_t capacity) { return capacity_for(capacity, slots, context); }};
}

void CudaBackend::open(const Bundle& bundle, const Variant& variant, OrtParts& options, OrtSettings settings) {
    const std::filesystem::path file = bundle.path / variant.file;
    settings.cuda_stream = pool_->device.stream();
    try {
        open_graph(graph_, file, cuda_provider, options, settings, variant);
    } catch (const Ort::Exception& error) {
        if (std::string(error.what()).find(no_capture) == std::string::npos) throw;
        note(settings.on_log, LogLevel::warning,
             file.string() + ": " + first_line(error) + "; steps are not captured as CUDA graphs, and are slower");
        options.of_provider[graphs] = "0";
        open_graph(graph_, file, cuda_provider, options, settings, variant);
    }
    captures_ = options.of_provider[graphs] != "0";
    widths_ = check_signature(graph_.session, file, variant, model_);
    place_ = {"Cuda", OrtDeviceAllocator, pool_->device.number(), OrtMemTypeDefault};
    eager_ = run_options(-1);
}

void CudaBackend::step(Cache& cache, std::int64_t first, const StepInput& input, bool want_logits, StepOutput& output) {
    const KvMemory& memory = dynamic_cast<GpuCache&>(cache).memory();
    const std::int64_t room = memory.capacity - *std::max_element(input.kv_length.begin(), input.kv_length.end());
    const StepInput fed = padded(input, input.rows, smallest_fit(sizes_, input.slots, room), decode_slots_, 0);
    const Shape shape{static_cast<std::int64_t>(memory.addresses.front()), memory.num_rows, memory.capacity, first, fed.rows, fed.slots};
    output.outputs = decode_slots_ + model_.mtp_drafts;
    output.mtp_drafts = model_.mtp_drafts;
    output.vocab_size = model_.vocab_size;
    if (!want_logits) output.logits.clear();
    const KvPool::Turn turn(*pool_);
    const auto undo = [&] {
        pool_->device.settle(); // its copies still use memory that the next step writes
        shapes_.remove_if([&](const BoundShape& bound) { return bound.shape == shape; });
    };
    try {
        StepIO& io = io_for(fed.rows);
        io.send(pool_->device, fed);
        output.is_prepared = run(bound_for(shape, memory, io), fed.slots == decode_slots_);
        io.fetch(pool_->device, fed.rows, output.outputs, want_logits, input.want_topk, output);
    } catch (const Ort::Exception& error) {
        undo();
        rethrow<DeviceError>(error, failed_step(input), step_advice);
    } catch (...) {
        undo();
        throw;
    }
}

/// Run a step; whether it was replayed, or cannot be. The first of a shape is not captured, because it may be the only one.
bool CudaBackend::run(BoundShape& bound, bool is_decode) {
    if (bound.thread != std::this_thread::get_id()) {
        bound.thread = std::this_thread::get_id();
        bound.runs = 0;
    }
    const bool is_first = bound.runs++ == 0,
               is_new = is_decode && captures_ && !is_first && bound.graph_id == 0 && num_graphs_ < max_graphs;
    if (is_new) {
        bound.graph_id = ++num_graphs_;
        bound.captured = run_options(bound.graph_id);
    }
    const bool is_captured = bound.graph_id > 0 && !is_first;
    // The run before a capturing one allocates what both need: allocating ends a capture.
    if (!is_captured || bound.runs == 2) graph_.session.Run(eager_, bound.binding);
    if (is_captured) graph_.session.Run(bound.captured, bound.binding);
    return is_captured ? bound.runs > 2 : !is_first;
}

/// The binding of a shape: KV memory as past and present, inputs and results in their fixed places. A captured step is kept when
/// its memory is freed: it is run again only if memory of the same layout is at that address.
CudaBackend::BoundShape& CudaBackend::bound_for(const Shape& shape, const KvMemory& memory, const StepIO& io) {
    const auto found = std::find_if(shapes_.begin(), shapes_.end(), [&](const BoundShape& bound) { return bound.shape == shape; });
    if (found != shapes_.end()) {
        shapes_.splice(shapes_.begin(), shapes_, found);
        return shapes_.front();
    }
    if (shapes_.size() >= max_shapes)
        shapes_.erase(
            std::next(std::find_if(shapes_.rbegin(), shapes_.rend(), [](const BoundShape& bound) { return bound.graph_id == 0; })).base());
    const auto [address, all_rows, capacity, first, rows, slots] = shape;
    const std::int64_t outputs = decode_slots_ + model_.mtp_drafts;
    Ort::IoBinding binding(graph_.session);
    const auto tensor = [&](Address at, std::int64_t item, const std::vector<std::int64_t>& sizes, ONNXTensorElementDataType type) {
        std::int64_t num_bytes = item;
        for (const std::int64_t size : sizes) num_bytes *= size;
        return Ort::Value::CreateTensor(place_, reinterpret_cast<void*>(at), static_cast<std::size_t>(num_bytes), sizes.data(),
                                        sizes.size(), type);
    };
    for (std::size_t i = 0; i < suffixes_.size(); ++i) {
        const Address at = memory.addresses[i] + static_cast<std::size_t>(first) * memory.row_bytes;
        const Ort::Value kv = tensor(at, kv_.item, kv_.shape(rows, capacity), kv_.type);
        binding.BindInput(("past_key_values." + suffixes_[i]).c_str(), kv);
        binding.BindOutput(("present." + suffixes_[i]).c_str(), kv);
    }
    std::map<std::string, Address> places = io.addresses(rows, outputs);
    const std::pair<const char*, std::vector<std::int64_t>> inputs[] = {
        {"input_ids", {rows, slots}}, {"kv_length", {rows}}, {"output_index", {rows, decode_slots_}}};
    for (const auto& [name, sizes] : inputs)
        binding.BindInput(name, tensor(places.at(name), 8, sizes, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
    for (const std::string& name : outputs_) {
        std::vector<std::int64_t> sizes{rows, outputs};
        if (is_wide(name)) sizes.push_back(widths_.at(name));
        const bool is_int = is_ids(name);
        binding.BindOutput(name.c_str(), tensor(places.at(name), is_int ? 8 : 4, sizes,
                                                is_int ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
    }
    shapes_.push_front({shape, std::move(binding)});
    return shapes_.front();
}

/// Inputs and results of steps of that many rows.
StepIO& CudaBackend::io_for(std::int64_t rows) {
    const std::int64_t most = power_of_two(rows);
    const auto at = ios_.find(most);
    if (at != ios_.end()) return at->second;
    return ios_.emplace(most, StepIO(pool_->device, most, *sizes_.rbegin(), decode_slots_ + model_.mtp_drafts, widths_)).first->second;
}

} // namespace mars
