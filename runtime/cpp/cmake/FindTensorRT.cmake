# TensorRT or TensorRT-RTX from TensorRT_ROOT or the system, and the CUDA runtime from CUDAToolkit_ROOT or where toolkits are installed.
# Makes TensorRT::TensorRT. Headers alone are not enough: the library of the same version must be there.
find_path(TensorRT_INCLUDE_DIR NvInfer.h PATH_SUFFIXES include include/${CMAKE_LIBRARY_ARCHITECTURE})
find_library(TensorRT_LIBRARY NAMES nvinfer tensorrt_rtx PATH_SUFFIXES lib lib64 lib/${CMAKE_LIBRARY_ARCHITECTURE})
set(_mars_cuda_places "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_PATH}" /usr/local/cuda)
find_path(TensorRT_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${_mars_cuda_places} PATH_SUFFIXES include)
find_library(TensorRT_CUDART_LIBRARY cudart HINTS ${_mars_cuda_places} PATH_SUFFIXES lib64 lib lib/${CMAKE_LIBRARY_ARCHITECTURE})

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    TensorRT
    REQUIRED_VARS TensorRT_INCLUDE_DIR TensorRT_LIBRARY TensorRT_CUDA_INCLUDE_DIR TensorRT_CUDART_LIBRARY
    REASON_FAILURE_MESSAGE "set TensorRT_ROOT and CUDAToolkit_ROOT to directories with include/ and lib/ (docs/cpp.md)")
# The word of manifests for what was found.
if(TensorRT_LIBRARY MATCHES "tensorrt_rtx")
    set(TensorRT_FLAVOR tensorrt_rtx)
else()
    set(TensorRT_FLAVOR tensorrt)
endif()
mark_as_advanced(TensorRT_INCLUDE_DIR TensorRT_LIBRARY TensorRT_CUDA_INCLUDE_DIR TensorRT_CUDART_LIBRARY)

if(TensorRT_FOUND AND NOT TARGET TensorRT::TensorRT)
    add_library(TensorRT::TensorRT UNKNOWN IMPORTED)
    set_target_properties(
        TensorRT::TensorRT
        PROPERTIES IMPORTED_LOCATION "${TensorRT_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${TensorRT_INCLUDE_DIR};${TensorRT_CUDA_INCLUDE_DIR}"
                   INTERFACE_LINK_LIBRARIES "${TensorRT_CUDART_LIBRARY}")
endif()
