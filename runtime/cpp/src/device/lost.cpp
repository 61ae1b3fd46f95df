#include "device/lost.hpp"

#include <regex>

namespace mars {

bool is_lasting(const std::string& words) {
    // By name as CUDA writes it, or by number as ONNX Runtime does.
    static const std::regex lasting("cudaError(ECCUncorrectable|NvlinkUncorrectable|Contained|IllegalAddress|LaunchTimeout|Assert|"
                                    "HardwareStackError|IllegalInstruction|"
                                    "MisalignedAddress|InvalidAddressSpace|InvalidPc|LaunchFailure|TensorMemoryLeak|ExternalDevice)|"
                                    "CUDA (failure|error) (214|220|226|700|702|710|714|715|716|717|718|719|721|911)(?!\\d)");
    return std::regex_search(words, lasting);
}

} // namespace mars
