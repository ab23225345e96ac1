# One library a room, one test program a room. A room names its sources and the rooms it may see;
# the include checker (tools/check_includes.py) proves that its sources see no others.

add_library(fathom_options INTERFACE)
target_compile_features(fathom_options INTERFACE cxx_std_20)
target_compile_options(fathom_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Werror>)
target_include_directories(fathom_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
if(FATHOM_SANITIZE)
  # What sanitizers add makes g++ 12 warn of its own std::function and std::variant; clang 19 warns
  # of what its std::stable_sort calls.
  target_compile_options(fathom_options INTERFACE -fsanitize=${FATHOM_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all
                         $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
                         $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>)
  target_link_options(fathom_options INTERFACE -fsanitize=${FATHOM_SANITIZE})
endif()
if(FATHOM_FUZZ)
  # The rooms themselves report what an input reached; without it the fuzzer searches blindly.
  target_compile_options(fathom_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Code that runs once or waits for a person: built in a third less time.
function(fathom_build_quickly TARGET)
  target_compile_options(${TARGET} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# Compiles a target's sources eight at a time, so that they read the headers that they share once: on
# two cores everything is to be built in less than ten minutes. Sources with options of their own
# (instruction sets) are compiled alone.
#
# So are those in FATHOM_ALONE (tools/mutants.py changes one at a time). The other sources stay in their
# batches, because two batches may use the same names in their anonymous namespaces.
set(FATHOM_ALONE "" CACHE STRING "Sources, from the root on, that are compiled one at a time")
function(fathom_build_in_batches TARGET)
  get_target_property(SOURCES ${TARGET} SOURCES)
  list(LENGTH SOURCES COUNT)
  if(COUNT EQUAL 1)
    return()
  endif()
  set_target_properties(${TARGET} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  file(RELATIVE_PATH HERE ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  set(INDEX 0)
  foreach(SOURCE IN LISTS SOURCES)
    math(EXPR BATCH "${INDEX} / 8")
    if(${HERE}/${SOURCE} IN_LIST FATHOM_ALONE)
      set_source_files_properties(${SOURCE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    else()
      set_source_files_properties(${SOURCE} PROPERTIES UNITY_GROUP ${BATCH})
    endif()
    math(EXPR INDEX "${INDEX} + 1")
  endforeach()
endfunction()

# fathom_room(NAME SOURCES … DEPS …): the library fathom_NAME.
function(fathom_room NAME)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPS" ${ARGN})
  add_library(fathom_${NAME} STATIC ${ROOM_SOURCES})
  target_link_libraries(fathom_${NAME} PUBLIC fathom_options ${ROOM_DEPS})
  fathom_build_in_batches(fathom_${NAME})
endfunction()

# fathom_test(NAME SOURCES … DEPS … [LABEL slow] [THREADED]): the test program NAME_test, known to
# ctest as NAME. THREADED: it shares memory between threads; `threaded_tests` builds those.
add_custom_target(threaded_tests)
function(fathom_test NAME)
  if(NOT FATHOM_TESTS)
    return()
  endif()
  cmake_parse_arguments(TEST "THREADED" "LABEL" "SOURCES;DEPS" ${ARGN})
  add_executable(${NAME}_test ${TEST_SOURCES})
  target_link_libraries(${NAME}_test PRIVATE fathom_options ${TEST_DEPS} GTest::gtest_main)
  fathom_build_quickly(${NAME}_test)
  fathom_build_in_batches(${NAME}_test)
  target_compile_definitions(${NAME}_test PRIVATE FATHOM_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  add_test(NAME ${NAME} COMMAND ${NAME}_test)
  if(TEST_THREADED)
    add_dependencies(threaded_tests ${NAME}_test)
    list(APPEND TEST_LABEL threaded)
  endif()
  set_tests_properties(${NAME} PROPERTIES LABELS "${TEST_LABEL}")
endfunction()

# fathom_bench(NAME SOURCES … DEPS …): the benchmark program NAME_bench; `benchmarks` builds all.
add_custom_target(benchmarks)
function(fathom_bench NAME)
  if(NOT FATHOM_BENCHMARKS)
    return()
  endif()
  cmake_parse_arguments(BENCH "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${NAME}_bench EXCLUDE_FROM_ALL ${BENCH_SOURCES})
  add_dependencies(benchmarks ${NAME}_bench)
  target_link_libraries(${NAME}_bench PRIVATE fathom_options ${BENCH_DEPS} benchmark::benchmark_main)
endfunction()

# fathom_cuda_room(NAME SOURCES … DEPS …): the library fathom_NAME, kernels and what launches them.
# `gpu` builds all that runs on a GPU; nothing else does.
if(FATHOM_CUDA)
  add_custom_target(gpu)
else()
  add_custom_target(gpu COMMAND ${CMAKE_COMMAND} -E echo
    "Building for GPUs needs CUDA 13's nvcc in the PATH (or CUDACXX), and configuring again."
    COMMAND ${CMAKE_COMMAND} -E false)
endif()
function(fathom_cuda_room NAME)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPS" ${ARGN})
  add_library(fathom_${NAME} STATIC EXCLUDE_FROM_ALL ${ROOM_SOURCES})
  target_include_directories(fathom_${NAME} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  target_compile_options(fathom_${NAME} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a -lineinfo>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Werror>)
  target_link_libraries(fathom_${NAME} PUBLIC CUDA::cudart_static ${ROOM_DEPS})
  fathom_build_in_batches(fathom_${NAME})
endfunction()

# fathom_gpu_program(NAME SOURCES … DEPS …): a program that `gpu` builds: a test or a benchmark. What
# Debian has as a static library is linked so: GPU machines need not have Debian's packages.
function(fathom_gpu_program NAME)
  cmake_parse_arguments(PROGRAM "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${NAME} EXCLUDE_FROM_ALL ${PROGRAM_SOURCES})
  target_link_libraries(${NAME} PRIVATE ${PROGRAM_DEPS} CUDA::cudart_static)
  target_link_options(${NAME} PRIVATE -static-libstdc++ -static-libgcc)
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/gpu)
  add_dependencies(gpu ${NAME})
endfunction()

# The tests of this folder run the program on the CPU, on a machine with a GPU too.
function(fathom_tests_on_cpu)
  get_property(HERE DIRECTORY PROPERTY TESTS)
  set_property(TEST ${HERE} APPEND PROPERTY ENVIRONMENT FATHOM_DEVICE=cpu)
endfunction()
