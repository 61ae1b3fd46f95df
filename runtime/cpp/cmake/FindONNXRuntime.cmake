# ONNX Runtime's headers, from ONNXRuntime_ROOT (a release archive, or what setup.sh makes) or from the system; and its library if it is
# there, which libmars loads at run time.
find_path(ONNXRuntime_INCLUDE_DIR onnxruntime_cxx_api.h PATH_SUFFIXES include onnxruntime include/onnxruntime onnxruntime/core/session)
find_library(ONNXRuntime_LIBRARY onnxruntime PATH_SUFFIXES lib lib64)
if(ONNXRuntime_INCLUDE_DIR)
    file(STRINGS "${ONNXRuntime_INCLUDE_DIR}/onnxruntime_c_api.h" ONNXRuntime_VERSION REGEX "#define ORT_API_VERSION [0-9]+")
    string(REGEX REPLACE ".* ([0-9]+)$" "1.\\1" ONNXRuntime_VERSION "${ONNXRuntime_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    ONNXRuntime
    REQUIRED_VARS ONNXRuntime_INCLUDE_DIR
    VERSION_VAR ONNXRuntime_VERSION
    REASON_FAILURE_MESSAGE "set ONNXRuntime_ROOT to a directory with include/, or run runtime/cpp/setup.sh (docs/cpp.md)")
mark_as_advanced(ONNXRuntime_INCLUDE_DIR ONNXRuntime_LIBRARY)
