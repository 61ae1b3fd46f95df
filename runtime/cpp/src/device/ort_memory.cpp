// Allocators by name, and one session for each kind and number of copies.
#include "device/ort_memory.hpp"

#include <string>

namespace mars {

namespace {

constexpr ONNXTensorElementDataType byte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

OrtMemType kind_of(const std::string& name) { return name == "CudaPinned" ? OrtMemTypeCPUOutput : OrtMemTypeDefault; }

Ort::MemoryInfo info_of(const std::string& name, int index) { return {name.c_str(), OrtDeviceAllocator, index, kind_of(name)}; }

} // namespace

std::optional<OrtPlace> place_of(const std::string& provider, const OrtOptions& of_provider) {
    if (provider != "CUDAExecutionProvider") return std::nullopt;
    const auto index = of_provider.find("device_id");
    OrtPlace place{"Cuda", "Cuda", "CudaPinned", 0};
    if (index != of_provider.end() && index->second.find_first_not_of("0123456789") == std::string::npos && index->second.size() < 4 &&
        !index->second.empty())
        place.index = std::stoi(index->second);
    return place;
}

OrtBlock::OrtBlock(std::shared_ptr<Ort::Allocator> allocator, std::size_t num_bytes)
    : allocator_(std::move(allocator)), data_(static_cast<unsigned char*>(allocator_->Alloc(num_bytes))), size_(num_bytes) {}

OrtBlock& OrtBlock::operator=(OrtBlock&& other) noexcept {
    release();
    allocator_ = std::move(other.allocator_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    return *this;
}

void OrtBlock::release() noexcept {
    if (data_ != nullptr) allocator_->Free(data_);
    data_ = nullptr;
}

OrtMemory::OrtMemory(std::shared_ptr<OrtGraph> graph, const OrtPlace& place, std::function<void(Ort::SessionOptions&)> add_provider,
                     ONNXTensorElementDataType type, std::int64_t element_bytes, std::shared_ptr<Worker> worker)
    : graph_(std::move(graph)), add_provider_(std::move(add_provider)), type_(type), element_bytes_(element_bytes),
      bound_(info_of(place.bound, place.index)), pageable_(Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault)),
      staged_(info_of(place.host, 0)), worker_(std::move(worker)) {
    const std::shared_ptr<Ort::Session> session =
        worker_ ? copies(CopyKind::identity, 1) : std::shared_ptr<Ort::Session>(graph_, &graph_->session);
    // An allocator goes before the session that it is of, and that before its environment.
    struct Held {
        std::shared_ptr<OrtGraph> graph;
        std::shared_ptr<Ort::Session> session;
        Ort::Allocator allocator;
    };
    const auto of = [&](const std::string& name, int index) {
        const std::shared_ptr<Held> owner(new Held{graph_, session, Ort::Allocator(*session, info_of(name, index))});
        return std::shared_ptr<Ort::Allocator>(owner, &owner->allocator);
    };
    rows_ = of(place.rows, place.index);
    host_ = of(place.host, 0);
}

OrtBlock OrtMemory::allocate(std::size_t num_bytes) {
    return run_in(worker_, [&] { return OrtBlock(rows_, num_bytes); });
}

OrtBlock OrtMemory::staging(std::size_t num_bytes) {
    return run_in(worker_, [&] { return OrtBlock(host_, num_bytes); });
}

std::vector<OrtBlock> OrtMemory::allocate_rows(std::size_t count, KvShape shape, std::size_t num_bytes) {
    const auto made = [&] {
        std::vector<OrtBlock> blocks;
        for (std::size_t i = 0; i < count; ++i) blocks.emplace_back(rows_, num_bytes);
        return blocks;
    };
    if (!worker_) return made();
    return worker_->run([&] {
        std::vector<OrtBlock> blocks = kept_.take(shape);
        if (!blocks.empty()) return blocks;
        try {
            return made();
        } catch (const Ort::Exception&) { // what is idle makes room
            kept_.clear();
            return made();
        }
    });
}

void OrtMemory::give_up(KvShape shape, std::vector<OrtBlock> blocks) {
    if (worker_ && !blocks.empty()) kept_.give(shape, std::move(blocks));
}

Ort::Value OrtMemory::tensor(unsigned char* address, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                             ONNXTensorElementDataType type) const {
    return Ort::Value::CreateTensor(bound_, address, num_bytes, shape.data(), shape.size(), type);
}

Ort::Value OrtMemory::host_tensor(unsigned char* address, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                                  ONNXTensorElementDataType type) const {
    return Ort::Value::CreateTensor(staged_, address, num_bytes, shape.data(), shape.size(), type);
}

Ort::Value OrtMemory::on_host(unsigned char* address, std::size_t num_bytes, bool is_staged) const {
    const auto size = static_cast<std::int64_t>(num_bytes);
    return Ort::Value::CreateTensor(is_staged ? staged_ : pageable_, address, num_bytes, &size, 1, byte);
}

const std::shared_ptr<Ort::Session>& OrtMemory::copies(CopyKind kind, std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = sessions_.find({kind, count});
    if (at != sessions_.end()) return at->second;
    Ort::SessionOptions options;
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);
    options.SetIntraOpNumThreads(1); // the device copies
    add_provider_(options);
    const std::string model = copy_graph(kind, count, static_cast<int>(kind == CopyKind::pad ? type_ : byte));
    auto session = std::make_shared<Ort::Session>(graph_->env, model.data(), model.size(), options);
    return sessions_.emplace(std::pair(kind, count), std::move(session)).first->second;
}

void OrtMemory::copy(const std::vector<Pair>& pairs, std::size_t num_bytes) {
    run_in(worker_, [&] {
        Ort::Session& session = *copies(CopyKind::identity, pairs.size());
        Ort::IoBinding binding(session);
        const std::vector<std::int64_t> shape{static_cast<std::int64_t>(num_bytes)};
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            // ONNX Runtime writes through outputs only; its API has no const tensors.
            auto* source = const_cast<unsigned char*>(pairs[i].first);
            binding.BindInput(("in" + std::to_string(i)).c_str(), tensor(source, num_bytes, shape, byte));
            binding.BindOutput(("out" + std::to_string(i)).c_str(), tensor(pairs[i].second, num_bytes, shape, byte));
        }
        session.Run(Ort::RunOptions{nullptr}, binding);
    });
}

void OrtMemory::pad(const std::vector<Pair>& pairs, OrtRuns from, OrtRuns to) {
    run_in(worker_, [&] { run_pad(pairs, from, to); });
}

void OrtMemory::run_pad(const std::vector<Pair>& pairs, OrtRuns from, OrtRuns to) {
    Ort::Session& session = *copies(CopyKind::pad, pairs.size());
    Ort::IoBinding binding(session);
    std::int64_t pads[] = {0, 0, 0, to.length - from.length};
    const std::int64_t four = 4;
    binding.BindInput("shared", Ort::Value::CreateTensor<std::int64_t>(pageable_, pads, 4, &four, 1)); // the operator reads it on the host
    const auto bytes_of = [&](OrtRuns runs) { return static_cast<std::size_t>(runs.count * runs.length * element_bytes_); };
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        auto* source = const_cast<unsigned char*>(pairs[i].first);
        binding.BindInput(("in" + std::to_string(i)).c_str(), tensor(source, bytes_of(from), {from.count, from.length}, type_));
        binding.BindOutput(("out" + std::to_string(i)).c_str(), tensor(pairs[i].second, bytes_of(to), {to.count, to.length}, type_));
    }
    session.Run(Ort::RunOptions{nullptr}, binding);
}

void OrtMemory::upload(unsigned char* target, const unsigned char* source, std::size_t num_bytes, bool is_staged) {
    run_in(worker_, [&] {
        Ort::Session& session = *copies(CopyKind::identity, 1);
        Ort::IoBinding binding(session);
        binding.BindInput("in0", on_host(const_cast<unsigned char*>(source), num_bytes, is_staged));
        binding.BindOutput("out0", tensor(target, num_bytes, {static_cast<std::int64_t>(num_bytes)}, byte));
        session.Run(Ort::RunOptions{nullptr}, binding);
    });
    sent += num_bytes;
}

void OrtMemory::download(unsigned char* target, const unsigned char* source, std::size_t num_bytes, bool is_staged) {
    run_in(worker_, [&] {
        Ort::Session& session = *copies(CopyKind::identity, 1);
        Ort::IoBinding binding(session);
        binding.BindInput("in0", tensor(const_cast<unsigned char*>(source), num_bytes, {static_cast<std::int64_t>(num_bytes)}, byte));
        binding.BindOutput("out0", on_host(target, num_bytes, is_staged));
        session.Run(Ort::RunOptions{nullptr}, binding);
    });
    fetched += num_bytes;
}

} // namespace mars
