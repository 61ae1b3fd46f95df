// As much of an ONNX file as the stub's parser judges: inputs, nodes, and which other files it takes data from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stub {

struct OnnxInput {
    std::string name;
    int type = 0;                    // as ONNX numbers them
    std::vector<std::int64_t> shape; // -1: symbolic
};

struct OnnxNode {
    std::string name, operation, domain;
    std::vector<std::string> inputs;
};

struct OnnxFile {
    std::vector<OnnxInput> inputs;
    std::vector<OnnxNode> nodes;
    std::vector<std::string> locations; // of external data
};

/// Throws std::exception for invalid data.
OnnxFile read_onnx(const std::string& data);

} // namespace stub
