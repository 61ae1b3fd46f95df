// Stand-in for TensorRT's header: the few declarations that src/device/trt/engine.cpp uses, with this project's own text.
// engine.cpp beside it implements them. MARS_STUB_RTX makes it TensorRT-RTX's, which has more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#ifdef MARS_STUB_RTX
#define TRT_MAJOR_RTX 1
#endif

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
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

} // namespace nvinfer1

std::int32_t getInferLibMajorVersion() noexcept;
std::int32_t getInferLibMinorVersion() noexcept;
std::int32_t getInferLibPatchVersion() noexcept;
std::int32_t getInferLibBuildVersion() noexcept;
