# Cross-compile for Windows with the Clang, headers and C++ library of the ziglang package. Its program `python-zig` must be
# on PATH, and CHUNKRT_WINDOWS_MACHINE is x86_64 or aarch64.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR ${CHUNKRT_WINDOWS_MACHINE})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES CHUNKRT_WINDOWS_MACHINE)
find_program(CHUNKRT_ZIG python-zig REQUIRED NO_CMAKE_FIND_ROOT_PATH)
# Zig compiles its C++ library for each level of optimisation, and with and without symbols (-s). All options that choose
# the library are part of the compiler, so that CMake's tests of the compiler use the same library as the module.
set(CMAKE_CXX_COMPILER ${CHUNKRT_ZIG} c++ -target ${CHUNKRT_WINDOWS_MACHINE}-windows-gnu -O3 -s)
set(CMAKE_CXX_ARCHIVE_CREATE "${CHUNKRT_ZIG} ar qcs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Zig names the extensions of an architecture in its own way.
set(CHUNKRT_FLAGS_neon_dotprod -mcpu=generic+v8_2a+dotprod)
set(CHUNKRT_FLAGS_neon_i8mm -mcpu=generic+v8_2a+dotprod+i8mm)
set(CHUNKRT_FLAGS_neon_bf16 -mcpu=generic+v8_2a+bf16+i8mm)
