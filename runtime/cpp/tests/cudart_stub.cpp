// The calls of the CUDA runtime that src/device/ort/memory.cpp loads, on the host's memory: libcudart.so.13 of the tests.
#include <cstdlib>
#include <cstring>

extern "C" {
int stub_device = 2, stub_integrated = 0, stub_error = 0; // which GPU is current; whether it shares memory; what calls fail with

int cudaGetDevice(int* device) { return *device = stub_device, 0; }
int cudaSetDevice(int device) { return stub_device = device, 0; }
int cudaMalloc(void** memory, std::size_t num_bytes) { return *memory = std::malloc(num_bytes), stub_device == 1 ? 0 : 400; }
int cudaFree(void* memory) { return std::free(memory), 0; }
int cudaMemset(void* memory, int value, std::size_t num_bytes) { return std::memset(memory, value, num_bytes), 0; }
int cudaMemcpy2D(void* target, std::size_t to, const void* source, std::size_t from, std::size_t width, std::size_t height, int kind) {
    for (std::size_t y = 0; y < height; ++y)
        std::memcpy(static_cast<char*>(target) + y * to, static_cast<const char*>(source) + y * from, width);
    return kind == 3 && stub_device == 1 ? stub_error : 1;
}
int cudaDeviceSynchronize() { return 0; }
int cudaMemGetInfo(std::size_t* free, std::size_t* total) { return *free = 1000, *total = 2000, 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 18 ? stub_integrated : -1, 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorName(int error) { return error == 700 ? "cudaErrorIllegalAddress" : "cudaErrorOther"; }
}
