#include "device/trt/engine.hpp"

#include <algorithm>
#include <map>

#include <mars/errors.hpp>

#include "bundle/files.hpp"
#include "bundle/profiles.hpp"

namespace mars {

namespace {

#ifdef TRT_MAJOR_RTX
/// The file of an engine's compiled kernels, hidden beside the bundle.
std::filesystem::path kernel_file(const Bundle& bundle, const Variant& variant) {
    std::error_code error;
    const std::filesystem::path directory = std::filesystem::canonical(bundle.path, error);
    const std::string sha = sha256_of(bundle.manifest, variant.file).value_or("").substr(0, 12);
    return directory.parent_path() / ("." + directory.filename().string() + "." + variant.name + "-" + sha + ".kernels");
}
#endif

std::string dtype_name(nvinfer1::DataType type) {
    using Type = nvinfer1::DataType;
    static const std::map<Type, const char*> names{
        {Type::kFLOAT, "float32"}, {Type::kHALF, "float16"}, {Type::kBF16, "bfloat16"}, {Type::kINT64, "int64"}};
    const auto at = names.find(type);
    return at == names.end() ? "" : at->second;
}

/// Older versions of TensorRT have no aliases.
template <typename Engine>
auto alias_of(const Engine& engine, const char* name, int) -> decltype(engine.getAliasedInputTensor(name)) {
    return engine.getAliasedInputTensor(name);
}

template <typename Engine>
const char* alias_of(const Engine&, const char*, long) {
    return nullptr;
}

} // namespace

bool is_capturable([[maybe_unused]] nvinfer1::IExecutionContext& context, [[maybe_unused]] void* stream) {
#ifdef TRT_MAJOR_RTX
    return context.isStreamCapturable(static_cast<cudaStream_t>(stream));
#else
    return true; // the capture itself shows it
#endif
}

nvinfer1::Dims dims_of(const std::vector<std::int64_t>& shape) {
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), std::begin(dims.d));
    return dims;
}

LoadedEngine::LoadedEngine(const Bundle& bundle, const Variant& variant, OnLog on_log)
    : log_(std::move(on_log)), runtime_(nvinfer1::createInferRuntime(log_)) {
    const std::filesystem::path path = bundle.path / variant.file;
    const MappedFile data(path);
    if (runtime_) engine_.reset(runtime_->deserializeCudaEngine(data.data(), data.size()));
    if (!engine_)
        throw SessionError(path.string() + ": " + tensorrt_flavor() + " " + tensorrt_version() +
                           " cannot load this engine: " + log_.last(3));
#ifdef TRT_MAJOR_RTX
    kernels_ = kernel_file(bundle, variant);
    prepare_kernels();
#endif
}

#ifdef TRT_MAJOR_RTX
void LoadedEngine::prepare_kernels() {
    config_.reset(engine_->createRuntimeConfig());
    if (!config_) throw DeviceError("TensorRT could not prepare an execution context: " + last_error());
    config_->setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
    // Not lazily: a graph captured before the better kernels are ready would replay the slower ones forever.
    config_->setDynamicShapesKernelSpecializationStrategy(nvinfer1::DynamicShapesKernelSpecializationStrategy::kEAGER);
    cache_.reset(config_->createRuntimeCache());
    if (!cache_) return;
    // TensorRT ignores a file of another GPU or version; it is then overwritten.
    if (const auto data = read_file(kernels_); data && cache_->deserialize(data->data(), data->size())) num_kernel_bytes_ = data->size();
    config_->setRuntimeCache(*cache_);
}
#endif

std::vector<EngineTensor> LoadedEngine::tensors() const {
    std::vector<EngineTensor> all;
    for (std::int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
        const char* name = engine_->getIOTensorName(i);
        const char* alias = alias_of(*engine_, name, 0);
        const nvinfer1::Dims dims = engine_->getTensorShape(name);
        all.push_back(
            {name, dtype_name(engine_->getTensorDataType(name)), {dims.d, dims.d + std::max(dims.nbDims, 0)}, alias ? alias : ""});
    }
    return all;
}

Context LoadedEngine::new_context(std::size_t range_index, Address scratch, void* stream) const {
#ifdef TRT_MAJOR_RTX
    Context context(engine_->createExecutionContext(config_.get()));
#else
    Context context(engine_->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
#endif
    if (!context) throw DeviceError("TensorRT could not create an execution context: " + last_error());
    context->setDeviceMemoryV2(reinterpret_cast<void*>(scratch), static_cast<std::int64_t>(scratch_bytes()));
    if (!context->setOptimizationProfileAsync(static_cast<std::int32_t>(range_index), static_cast<cudaStream_t>(stream)))
        throw SessionError("the engine has no optimization profile " + std::to_string(range_index) + "; build it again");
    return context;
}

void LoadedEngine::keep_kernels() {
#ifdef TRT_MAJOR_RTX
    if (!cache_ || kernels_.empty()) return;
    const std::unique_ptr<nvinfer1::IHostMemory> data(cache_->serialize());
    if (!data || data->size() == num_kernel_bytes_) return;
    num_kernel_bytes_ = data->size();
    // If the directory is not writable, kernels are compiled at every start.
    if (!write_whole(kernels_, {static_cast<const char*>(data->data()), data->size()})) kernels_.clear();
#endif
}

std::string tensorrt_flavor() {
#ifdef TRT_MAJOR_RTX
    return "tensorrt_rtx";
#else
    return "tensorrt";
#endif
}

std::string tensorrt_version() {
    return std::to_string(getInferLibMajorVersion()) + "." + std::to_string(getInferLibMinorVersion()) + "." +
           std::to_string(getInferLibPatchVersion()) + "." + std::to_string(getInferLibBuildVersion());
}

} // namespace mars
