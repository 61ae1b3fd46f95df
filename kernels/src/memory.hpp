#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace mars::kernels {
// Memory for weights that are read from one end to the other, at the begin of a cache line. The weights of a model lie in chunks with
// pages of 2 MB, if Linux has such pages; a chunk is freed with the last weights in it.
std::shared_ptr<int8_t> weight_memory(size_t bytes);

// Takes the pages of a mapped file out of this process, if all of them are as in the file; they are read again if they are needed.
void drop_file_pages(const void* memory, size_t bytes);
} // namespace mars::kernels
