# What every target of the workbook shares, and the functions that make one.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
include(${CMAKE_CURRENT_LIST_DIR}/OneShape.cmake)

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

find_package(Threads REQUIRED)
find_path(NLOHMANN_JSON_INCLUDE nlohmann/json.hpp REQUIRED)
find_path(CLI11_INCLUDE CLI/CLI.hpp REQUIRED)

if(WORKBOOK_GPU)
  if(WORKBOOK_SANITIZE)
    message(FATAL_ERROR "WORKBOOK_SANITIZE is for the emulator (preset cpu-asan); on a GPU use compute-sanitizer.")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${WORKBOOK_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 does not know nvcc's flag for C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  find_package(CUDAToolkit 12.4 REQUIRED)
else()
  # The emulator needs the toolkit's headers and nothing else of it.
  find_path(WORKBOOK_CUDA_INCLUDE cuda_runtime.h
    HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda
    PATH_SUFFIXES include targets/x86_64-linux/include
    DOC "Folder that holds cuda_runtime.h")
  if(NOT WORKBOOK_CUDA_INCLUDE)
    message(FATAL_ERROR "The CUDA headers (cuda_runtime.h) were not found. Run ./workbook doctor, or set -DWORKBOOK_CUDA_INCLUDE=<folder>.")
  endif()
  find_path(WORKBOOK_CCCL_INCLUDE thrust/device_vector.h
    HINTS ${WORKBOOK_CUDA_INCLUDE}/cccl ${WORKBOOK_CUDA_INCLUDE}
    DOC "Folder that holds thrust/")
  if(NOT WORKBOOK_CCCL_INCLUDE)
    message(FATAL_ERROR "Thrust's headers were not found. Run ./workbook doctor, or set -DWORKBOOK_CCCL_INCLUDE=<folder>.")
  endif()
  find_package(boost_context CONFIG QUIET)
  if(NOT TARGET Boost::context)
    find_package(Boost 1.71 REQUIRED COMPONENTS context)
  endif()
endif()

add_library(workbook_flags INTERFACE)
target_include_directories(workbook_flags INTERFACE ${PROJECT_SOURCE_DIR}/common)
target_include_directories(workbook_flags SYSTEM INTERFACE ${NLOHMANN_JSON_INCLUDE} ${CLI11_INCLUDE})
target_link_libraries(workbook_flags INTERFACE Threads::Threads)
# Device code says #pragma unroll, which g++ does not know; g++ 12 reports -Wrestrict inside of std::string (GCC bug 105651).
target_compile_options(workbook_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unknown-pragmas -Wno-restrict>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas>)
if(WORKBOOK_GPU)
  target_link_libraries(workbook_flags INTERFACE CUDA::cudart)
  target_compile_definitions(workbook_flags INTERFACE SIMT_GPU=1)
else()
  target_include_directories(workbook_flags SYSTEM INTERFACE ${WORKBOOK_CUDA_INCLUDE} ${WORKBOOK_CCCL_INCLUDE})
  target_link_libraries(workbook_flags INTERFACE Boost::context)
  # Most of this is compiled longer than it runs, and -O1 compiles in half the time. Emulated kernels run as fast: what they spend their time
  # in, and the references, are -O3 (common/CMakeLists.txt). A target with the property WORKBOOK_RUNS_BRIEFLY takes a third less than that.
  target_compile_options(workbook_flags INTERFACE
    $<$<NOT:$<CONFIG:Debug>>:$<IF:$<BOOL:$<TARGET_PROPERTY:WORKBOOK_RUNS_BRIEFLY>>,-Og,-O1>>)
  target_compile_definitions(workbook_flags INTERFACE THRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP)
endif()
if(WORKBOOK_SANITIZE)
  target_compile_options(workbook_flags INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  target_link_options(workbook_flags INTERFACE -fsanitize=address,undefined)
endif()

# workbook_precompile(<target> <headers>) or workbook_precompile(<target> REUSE_FROM <other>), in the emulator's build: parsing headers takes
# longer there than what stands below them. The gpu build goes without, and so finds an include that is missing.
function(workbook_precompile target)
  if(NOT WORKBOOK_GPU)
    if(ARGN MATCHES "^REUSE_FROM;")
      target_precompile_headers(${target} ${ARGN})
    else()
      target_precompile_headers(${target} PRIVATE ${ARGN})
    endif()
  endif()
endfunction()

# Sources that end in .cu go to nvcc in the gpu build and to the host compiler in the emulator's.
function(workbook_sources target)
  if(NOT WORKBOOK_GPU)
    foreach(source IN LISTS ARGN)
      if(source MATCHES "\\.cu$")
        set_source_files_properties(${source} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
      endif()
    endforeach()
  endif()
  target_sources(${target} PRIVATE ${ARGN})
endfunction()

# workbook_step(03 <sources>): library stage03 (for its program and its tests) and program step03.
function(workbook_step number)
  add_library(stage${number} STATIC)
  workbook_sources(stage${number} ${ARGN})
  target_include_directories(stage${number} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/..)
  target_link_libraries(stage${number} PUBLIC common)
  workbook_precompile(stage${number} REUSE_FROM common)
  add_executable(step${number} main.cpp)
  target_link_libraries(step${number} PRIVATE stage${number})
  workbook_precompile(step${number} REUSE_FROM common)
  if(NOT WORKBOOK_GPU)
    workbook_exercise(${number} ${ARGN})
  endif()
endfunction()

# exercise03 checks a learner's kernels: stage 03 in one shape, with the headers in exercise/kernels in the place of those of the same name
# in the step. There scripts/exercises.py puts the learner's; until then they are the step's own.
function(workbook_exercise number)
  cmake_path(GET CMAKE_CURRENT_SOURCE_DIR FILENAME step)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/exercise)
  set(with_fp8 ON)
  set(one_shape "")
  foreach(source IN ITEMS stage.cu fp8.cu)
    if(source IN_LIST ARGN)
      file(READ ${source} text)
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
      workbook_one_shape(text ${number} ${source})
      file(CONFIGURE OUTPUT ${folder}/${source} CONTENT "${text}" @ONLY)
      list(APPEND one_shape ${folder}/${source})
    endif()
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/main.cpp @ONLY CONTENT "#include \"${step}/stage.hpp\"
#include \"stage/check.hpp\"

int main(int argc, char** argv) { return workbook::check_main(step${number}::stage(), argc, argv); }
")
  file(GLOB kernels RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS *.cuh)
  foreach(kernel IN LISTS kernels)
    # It must be there before the first build, or Ninja does not know that it is depended on.
    if(NOT EXISTS ${folder}/kernels/${step}/${kernel})
      file(COPY ${kernel} DESTINATION ${folder}/kernels/${step})
    endif()
  endforeach()
  add_executable(exercise${number} EXCLUDE_FROM_ALL)
  workbook_sources(exercise${number} ${one_shape} ${folder}/main.cpp)
  target_include_directories(exercise${number} PRIVATE ${folder}/kernels ${CMAKE_CURRENT_SOURCE_DIR}/..)
  target_compile_options(exercise${number} PRIVATE -Wno-unused)
  target_link_libraries(exercise${number} PRIVATE common)
  workbook_precompile(exercise${number} REUSE_FROM common)
endfunction()

# Instructions of the architecture-specific set 90a: this target is compiled for it alone. No effect on the emulator's build.
function(workbook_hopper_only target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES 90a)
endfunction()
