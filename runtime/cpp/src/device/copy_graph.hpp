// ONNX models that only copy, written field by field as protobuf numbers them. Knows no library.
#pragma once

#include <cstddef>
#include <string>

namespace mars {

/// `identity`: in0 -> out0 and so on, bytes [n]. `pad`: [runs, length] each, cut or filled with zeros to another length; `shared` is the
/// operator's `pads`.
enum class CopyKind { identity, pad };

/// A model of `count` equal nodes; `element_type` as ONNX numbers them, shapes left open.
std::string copy_graph(CopyKind kind, std::size_t count, int element_type);

} // namespace mars
