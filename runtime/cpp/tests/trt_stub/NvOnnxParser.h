// Stand-in for the header of TensorRT's ONNX parser: the few declarations that src/device/trt/build.cpp uses. builder.cpp implements them.
#pragma once

#include <NvInfer.h>

namespace nvonnxparser {

class IParserError {
  public:
    virtual ~IParserError() = default;
    virtual const char* desc() const = 0;
    virtual const char* nodeName() const = 0;
    virtual const char* nodeOperator() const = 0;
};

class IParser {
  public:
    virtual ~IParser() = default;
    virtual bool parseFromFile(const char* file, int verbosity) noexcept = 0;
    virtual int getNbErrors() const noexcept = 0;
    virtual const IParserError* getError(int index) const noexcept = 0;
};

IParser* createParser(nvinfer1::INetworkDefinition& network, nvinfer1::ILogger& logger) noexcept;

} // namespace nvonnxparser
