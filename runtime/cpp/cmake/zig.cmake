# Toolchain of `make wheels`: the compiler in MARS_ZIG compiles for the system in MARS_TARGET, such as x86_64-linux-gnu.2.28
# (manylinux_2_28), with its own C++ library or with that of GCC in MARS_LIBSTDCXX, which libstdcxx.py fills. Environment variables,
# because CMake's own trial projects read them too.
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{MARS_TARGET}")
set(CMAKE_CXX_COMPILER "$ENV{MARS_ZIG}" c++ -target $ENV{MARS_TARGET})
set(MARS_ARM -mcpu=generic) # takes +FEATURE; `-march=armv8.2-a` is unknown to zig
if("$ENV{MARS_TARGET}" MATCHES "-linux-")
    set(CMAKE_SYSTEM_NAME Linux)
else()
    set(CMAKE_SYSTEM_NAME Darwin)
    set(CMAKE_INSTALL_NAME_TOOL true) # of Xcode; not needed, because no RPATH changes at installation
endif()
if(DEFINED ENV{MARS_LIBSTDCXX})
    set(mars_gcc "$ENV{MARS_LIBSTDCXX}")
    list(TRANSFORM CMAKE_CXX_COMPILER REPLACE "^c\\+\\+$" cc)
    file(READ "${mars_gcc}/include.txt" mars_includes)
    set(CMAKE_CXX_FLAGS_INIT "-nostdinc++ ${mars_includes} -w")
    set(CMAKE_CXX_STANDARD_LIBRARIES_INIT "${mars_gcc}/libnewer.a ${mars_gcc}/libstdc++.so.6 ${mars_gcc}/libgcc_s.so.1")
endif()
# The linker strips, for all systems alike.
set(CMAKE_STRIP true)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_EXE_LINKER_FLAGS_INIT -s)
