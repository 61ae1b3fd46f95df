// Stand-in for TensorRT's header: the few declarations that src/device/trt/engine.cpp and trt_build.cpp use, with this project's own text.
// engine.cpp and builder.cpp beside it implement them. MARS_STUB_RTX makes it TensorRT-RTX's, which has more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#ifdef MARS_STUB_RTX
#define TRT_MAJOR_RTX 1
#endif
#define NV_TENSORRT_MAJOR 10
#define NV_TENSORRT_MINOR 16

namespace nvinfer1 {

class ILogger {
  public:
    enum class Severity : std::int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };

    virtual ~ILogger() = default;
    virtual void log(Severity severity, const char* message) noexcept = 0;
};

struct Dims {
    std::int32_t nbDims;
    std::int64_t d[8];
};

enum class DataType : std::int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4 };

enum class ExecutionContextAllocationStrategy : std::int32_t { kSTATIC, kON_PROFILE_CHANGE, kUSER_MANAGED };

class IExecutionContext {
  public:
    virtual ~IExecutionContext() = default;
    virtual bool setInputShape(const char* name, const Dims& dims) noexcept = 0;
    virtual bool setTensorAddress(const char* name, void* address) noexcept = 0;
    virtual void setDeviceMemoryV2(void* memory, std::int64_t num_bytes) noexcept = 0;
    virtual bool setOptimizationProfileAsync(std::int32_t index, cudaStream_t stream) noexcept = 0;
    virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
#ifdef TRT_MAJOR_RTX
    virtual bool isStreamCapturable(cudaStream_t stream) const noexcept = 0;
#endif
};

class IHostMemory {
  public:
    virtual ~IHostMemory() = default;
    virtual void* data() const noexcept = 0;
    virtual std::size_t size() const noexcept = 0;
};

#ifdef TRT_MAJOR_RTX
class IRuntimeCache {
  public:
    virtual ~IRuntimeCache() = default;
    virtual IHostMemory* serialize() const noexcept = 0;
    virtual bool deserialize(const void* data, std::size_t num_bytes) noexcept = 0;
};

enum class DynamicShapesKernelSpecializationStrategy : std::int32_t { kLAZY, kEAGER, kNONE };

class IRuntimeConfig {
  public:
    virtual ~IRuntimeConfig() = default;
    virtual void setExecutionContextAllocationStrategy(ExecutionContextAllocationStrategy strategy) noexcept = 0;
    virtual void setDynamicShapesKernelSpecializationStrategy(DynamicShapesKernelSpecializationStrategy strategy) noexcept = 0;
    virtual IRuntimeCache* createRuntimeCache() const noexcept = 0;
    virtual bool setRuntimeCache(const IRuntimeCache& cache) noexcept = 0;
};

enum class EngineValidity : std::int32_t { kVALID, kSUBOPTIMAL, kINVALID };
enum class EngineInvalidityDiagnostics : std::int64_t {
    kVERSION_MISMATCH = 1,
    kUNSUPPORTED_CC = 2,
    kOLD_CUDA_DRIVER = 4,
    kOLD_CUDA_RUNTIME = 8,
    kINSUFFICIENT_GPU_MEMORY = 16,
    kMALFORMED_ENGINE = 32,
    kCUDA_ERROR = 64
};
#endif

class ICudaEngine {
  public:
    virtual ~ICudaEngine() = default;
    virtual std::int64_t getDeviceMemorySizeV2() const noexcept = 0;
    virtual std::int32_t getNbIOTensors() const noexcept = 0;
    virtual const char* getIOTensorName(std::int32_t index) const noexcept = 0;
    virtual DataType getTensorDataType(const char* name) const noexcept = 0;
    virtual Dims getTensorShape(const char* name) const noexcept = 0;
    virtual const char* getAliasedInputTensor(const char* name) const noexcept = 0; // not in older TensorRT
#ifdef TRT_MAJOR_RTX
    virtual IRuntimeConfig* createRuntimeConfig() noexcept = 0;
    virtual IExecutionContext* createExecutionContext(IRuntimeConfig* config) noexcept = 0;
#else
    virtual IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept = 0;
#endif
};

class IRuntime {
  public:
    virtual ~IRuntime() = default;
    virtual ICudaEngine* deserializeCudaEngine(const void* data, std::size_t num_bytes) noexcept = 0;
#ifdef TRT_MAJOR_RTX
    virtual EngineValidity getEngineValidity(const void* data, std::int64_t num_bytes, std::uint64_t* diagnostics) const noexcept = 0;
#endif
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

class ITensor {
  public:
    virtual ~ITensor() = default;
    virtual const char* getName() const noexcept = 0;
};

enum class LayerType : std::int32_t { kOTHER = 0, kATTENTION_INPUT = 51, kKVCACHE_UPDATE = 54 };

class ILayer {
  public:
    virtual ~ILayer() = default;
    virtual LayerType getType() const noexcept = 0;
};

class IAttention {
  public:
    virtual ~IAttention() = default;
    virtual ITensor* getMask() noexcept = 0;
    virtual bool setDecomposable(bool decomposable) noexcept = 0;
};

class IAttentionInputLayer : public ILayer {
  public:
    virtual IAttention* getAttention() const noexcept = 0;
};

class INetworkDefinition {
  public:
    virtual ~INetworkDefinition() = default;
    virtual std::int32_t getNbLayers() const noexcept = 0;
    virtual ILayer* getLayer(std::int32_t index) const noexcept = 0;
    virtual std::int32_t getNbInputs() const noexcept = 0;
    virtual ITensor* getInput(std::int32_t index) const noexcept = 0;
};

class IProgressMonitor {
  public:
    virtual ~IProgressMonitor() = default;
    virtual void phaseStart(const char* phase, const char* parent, std::int32_t num_steps) noexcept = 0;
    virtual bool stepComplete(const char* phase, std::int32_t step) noexcept = 0;
    virtual void phaseFinish(const char* phase) noexcept = 0;
};

enum class OptProfileSelector : std::int32_t { kMIN, kOPT, kMAX };

class IOptimizationProfile {
  public:
    virtual ~IOptimizationProfile() = default;
    virtual bool setDimensions(const char* name, OptProfileSelector select, const Dims& dims) noexcept = 0;
};

#ifdef TRT_MAJOR_RTX
enum class ComputeCapability : std::int32_t { kNONE, kCURRENT, kSM75 = 75, kSM80 = 80, kSM86 = 86, kSM89 = 89, kSM120 = 120, kSM121 = 121 };
enum class BuilderFlag : std::int32_t { kREQUIRE_USER_ALLOCATION = 1, kTF32 = 7 };
enum class NetworkDefinitionCreationFlag : std::int32_t { kSTRONGLY_TYPED = 0 };
#else
enum class BuilderFlag : std::int32_t { kTF32 = 7 };
enum class NetworkDefinitionCreationFlag : std::int32_t { kSTRONGLY_TYPED = 1 };
#endif
enum class MemoryPoolType : std::int32_t { kWORKSPACE = 0 };

class IBuilderConfig {
  public:
    virtual ~IBuilderConfig() = default;
    virtual std::int32_t addOptimizationProfile(const IOptimizationProfile* profile) noexcept = 0;
    virtual void setProgressMonitor(IProgressMonitor* monitor) noexcept = 0;
    virtual void clearFlag(BuilderFlag flag) noexcept = 0;
    virtual void setMemoryPoolLimit(MemoryPoolType pool, std::size_t num_bytes) noexcept = 0;
#ifdef TRT_MAJOR_RTX
    virtual bool setNbComputeCapabilities(std::int32_t count) noexcept = 0;
    virtual bool setComputeCapability(ComputeCapability capability, std::int32_t index) noexcept = 0;
    virtual void setFlag(BuilderFlag flag) noexcept = 0;
#endif
};

class IBuilder {
  public:
    virtual ~IBuilder() = default;
    virtual INetworkDefinition* createNetworkV2(std::uint32_t flags) noexcept = 0;
    virtual IBuilderConfig* createBuilderConfig() noexcept = 0;
    virtual IOptimizationProfile* createOptimizationProfile() noexcept = 0;
    virtual IHostMemory* buildSerializedNetwork(INetworkDefinition& network, IBuilderConfig& config) noexcept = 0;
};

IBuilder* createInferBuilder(ILogger& logger) noexcept;

} // namespace nvinfer1

std::int32_t getInferLibMajorVersion() noexcept;
std::int32_t getInferLibMinorVersion() noexcept;
std::int32_t getInferLibPatchVersion() noexcept;
std::int32_t getInferLibBuildVersion() noexcept;
