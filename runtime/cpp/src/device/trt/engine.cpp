// With TensorRT 10.3 or newer, or TensorRT-RTX (which defines TRT_MAJOR_RTX).
#include "device/trt/engine.hpp"

#include <NvInfer.h>
#include <algorithm>
#include <filesystem>

#include <mars/errors.hpp>

#include "bundle/files.hpp"
#include "device/trt/engine_log.hpp"
#include "joined.hpp"

namespace mars {

namespace {

std::string built_for(const Variant& variant) {
    const EngineInfo& info = *variant.engine;
    return "built with " + variant.backend + " " + info.version + " (CUDA " + info.cuda + ") for " + joined(info.compute_capabilities) +
           " on " + info.platform;
}

std::string here(int number) {
    const auto gpu = find_gpu(number);
    const Gpu* found = std::get_if<Gpu>(&gpu);
    const std::string device =
        found == nullptr ? std::get<std::string>(gpu) : found->name + ", " + found->capability + ", driver for CUDA " + found->driver;
    return tensorrt_flavor() + " " + tensorrt_version() + "; " + device;
}

/// TensorRT-RTX's reasons why a file does not load, each followed by "; ".
std::string diagnostics([[maybe_unused]] nvinfer1::IRuntime& runtime, [[maybe_unused]] const MappedFile& data) {
    std::string text;
#ifdef TRT_MAJOR_RTX
    using Kind = nvinfer1::EngineInvalidityDiagnostics;
    const std::pair<Kind, const char*> names[] = {{Kind::kVERSION_MISMATCH, "version mismatch"},
                                                  {Kind::kUNSUPPORTED_CC, "unsupported compute capability"},
                                                  {Kind::kOLD_CUDA_DRIVER, "old CUDA driver"},
                                                  {Kind::kOLD_CUDA_RUNTIME, "old CUDA runtime"},
                                                  {Kind::kINSUFFICIENT_GPU_MEMORY, "insufficient GPU memory"},
                                                  {Kind::kMALFORMED_ENGINE, "malformed engine"},
                                                  {Kind::kCUDA_ERROR, "CUDA error"}};
    std::uint64_t found = 0;
    runtime.getEngineValidity(data.data(), static_cast<std::int64_t>(data.size()), &found);
    for (const auto& [kind, name] : names)
        if ((found & static_cast<std::uint64_t>(kind)) != 0) text += std::string(name) + "; ";
#endif
    return text;
}

#ifdef TRT_MAJOR_RTX
/// The file of an engine's compiled kernels, hidden beside the bundle.
std::filesystem::path kernel_file(const Bundle& bundle, const Variant& variant) {
    std::error_code error;
    const std::filesystem::path directory = std::filesystem::canonical(bundle.path, error);
    std::string sha;
    for (const FileEntry& entry : bundle.manifest.files)
        if (entry.path == variant.file) sha = entry.sha256.substr(0, 12);
    return directory.parent_path() / ("." + directory.filename().string() + "." + variant.name + "-" + sha + ".kernels");
}
#endif

std::string dtype_name(nvinfer1::DataType type) {
    switch (type) {
    case nvinfer1::DataType::kFLOAT:
        return "float32";
    case nvinfer1::DataType::kHALF:
        return "float16";
    case nvinfer1::DataType::kBF16:
        return "bfloat16";
    case nvinfer1::DataType::kINT64:
        return "int64";
    default:
        return "";
    }
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

/// TensorRT-RTX has this since 1.2.
template <typename Execution>
auto is_capturable_on(Execution& execution, cudaStream_t stream, int) -> decltype(execution.isStreamCapturable(stream)) {
    return execution.isStreamCapturable(stream);
}

template <typename Execution>
bool is_capturable_on(Execution&, cudaStream_t, long) {
    return true;
}

} // namespace

struct Context::Held {
    std::unique_ptr<nvinfer1::IExecutionContext> context;
};

Context::Context(std::unique_ptr<Held> held) : held_(std::move(held)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

bool Context::set_input_shape(const std::string& name, const std::vector<std::int64_t>& shape) {
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), std::begin(dims.d));
    return held_->context->setInputShape(name.c_str(), dims);
}

bool Context::set_tensor_address(const std::string& name, Address address) {
    return held_->context->setTensorAddress(name.c_str(), reinterpret_cast<void*>(address));
}

bool Context::is_capturable(void* stream) const { return is_capturable_on(*held_->context, static_cast<cudaStream_t>(stream), 0); }

bool Context::enqueue(void* stream) { return held_->context->enqueueV3(static_cast<cudaStream_t>(stream)); }

struct LoadedEngine::Loaded {
    explicit Loaded(OnLog on_log) : logger(std::move(on_log)) {}

    Collected logger; // must outlive what reports to it
    std::unique_ptr<nvinfer1::IRuntime> runtime;
    std::unique_ptr<nvinfer1::ICudaEngine> engine;
#ifdef TRT_MAJOR_RTX
    std::unique_ptr<nvinfer1::IRuntimeConfig> config;
    std::unique_ptr<nvinfer1::IRuntimeCache> cache;
    std::filesystem::path kernels; // empty: not kept
    std::size_t kept = 0;          // size of that file

    void prepare_kernels() {
        config.reset(engine->createRuntimeConfig());
        if (!config) throw DeviceError("TensorRT could not prepare an execution context: " + logger.last(1));
        config->setExecutionContextAllocationStrategy(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
        // Not lazily: a graph captured before the better kernels are ready would replay the slower ones forever.
        config->setDynamicShapesKernelSpecializationStrategy(nvinfer1::DynamicShapesKernelSpecializationStrategy::kEAGER);
        cache.reset(config->createRuntimeCache());
        if (!cache) return;
        // TensorRT ignores a file of another GPU or version; it is then overwritten.
        if (const auto data = read_file(kernels); data && cache->deserialize(data->data(), data->size())) kept = data->size();
        config->setRuntimeCache(*cache);
    }
#endif

    nvinfer1::IExecutionContext* new_context() {
#ifdef TRT_MAJOR_RTX
        return engine->createExecutionContext(config.get());
#else
        return engine->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#endif
    }
};

LoadedEngine::LoadedEngine(const Bundle& bundle, const Variant& variant, int gpu, OnLog on_log)
    : loaded_(std::make_unique<Loaded>(std::move(on_log))) {
    const std::filesystem::path path = bundle.path / variant.file;
    const MappedFile data(path);
    Loaded& loaded = *loaded_;
    loaded.runtime.reset(nvinfer1::createInferRuntime(loaded.logger));
    if (!loaded.runtime) throw SessionError("TensorRT does not start (" + here(gpu) + "): " + loaded.logger.last(3));
    loaded.engine.reset(loaded.runtime->deserializeCudaEngine(data.data(), data.size()));
    if (!loaded.engine)
        throw SessionError(path.string() + ": " + built_for(variant) + " and cannot be loaded here (" + here(gpu) +
                           "): " + diagnostics(*loaded.runtime, data) + loaded.logger.last(3));
#ifdef TRT_MAJOR_RTX
    loaded.kernels = kernel_file(bundle, variant);
    loaded.prepare_kernels();
#endif
}

LoadedEngine::~LoadedEngine() = default;

std::vector<EngineTensor> LoadedEngine::tensors() const {
    const nvinfer1::ICudaEngine& engine = *loaded_->engine;
    std::vector<EngineTensor> all;
    for (std::int32_t i = 0; i < engine.getNbIOTensors(); ++i) {
        const char* name = engine.getIOTensorName(i);
        const char* alias = alias_of(engine, name, 0);
        const nvinfer1::Dims dims = engine.getTensorShape(name);
        all.push_back({name, dtype_name(engine.getTensorDataType(name)), {dims.d, dims.d + std::max(dims.nbDims, 0)}, alias ? alias : ""});
    }
    return all;
}

std::size_t LoadedEngine::scratch_bytes() const { return static_cast<std::size_t>(loaded_->engine->getDeviceMemorySizeV2()); }

Context LoadedEngine::new_context(std::size_t range_index, Address scratch, void* stream) const {
    auto held = std::make_unique<Context::Held>();
    held->context.reset(loaded_->new_context());
    if (!held->context) throw DeviceError("TensorRT could not create an execution context: " + last_error());
    held->context->setDeviceMemoryV2(reinterpret_cast<void*>(scratch), static_cast<std::int64_t>(scratch_bytes()));
    if (!held->context->setOptimizationProfileAsync(static_cast<std::int32_t>(range_index), static_cast<cudaStream_t>(stream)))
        throw SessionError("the engine has no optimization profile " + std::to_string(range_index) + "; build it again");
    return Context(std::move(held));
}

std::string LoadedEngine::last_error() const { return loaded_->logger.last(1); }

void LoadedEngine::keep_kernels() {
#ifdef TRT_MAJOR_RTX
    Loaded& loaded = *loaded_;
    if (!loaded.cache || loaded.kernels.empty()) return;
    const std::unique_ptr<nvinfer1::IHostMemory> data(loaded.cache->serialize());
    if (!data || data->size() == loaded.kept) return;
    loaded.kept = data->size();
    // If the directory is not writable, kernels are compiled at every start.
    if (!write_whole(loaded.kernels, {static_cast<const char*>(data->data()), data->size()})) loaded.kernels.clear();
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
