# One library a room, one test program a room. A room names its sources and the rooms it may see;
# the include checker (tools/check_includes.py) proves that its sources see no others.

add_library(fathom_options INTERFACE)
target_compile_features(fathom_options INTERFACE cxx_std_20)
target_compile_options(fathom_options INTERFACE -Wall -Wextra -Wshadow -Werror)
target_include_directories(fathom_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
if(FATHOM_SANITIZE)
  target_compile_options(fathom_options INTERFACE -fsanitize=${FATHOM_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
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

# fathom_room(NAME SOURCES … DEPS …): the library fathom_NAME.
function(fathom_room NAME)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPS" ${ARGN})
  add_library(fathom_${NAME} STATIC ${ROOM_SOURCES})
  target_link_libraries(fathom_${NAME} PUBLIC fathom_options ${ROOM_DEPS})
endfunction()

# fathom_test(NAME SOURCES … DEPS … [LABEL slow]): the test program NAME_test, known to ctest as NAME.
function(fathom_test NAME)
  if(NOT FATHOM_TESTS)
    return()
  endif()
  cmake_parse_arguments(TEST "" "LABEL" "SOURCES;DEPS" ${ARGN})
  add_executable(${NAME}_test ${TEST_SOURCES})
  target_link_libraries(${NAME}_test PRIVATE fathom_options ${TEST_DEPS} GTest::gtest_main)
  fathom_build_quickly(${NAME}_test)
  target_compile_definitions(${NAME}_test PRIVATE FATHOM_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  add_test(NAME ${NAME} COMMAND ${NAME}_test)
  if(TEST_LABEL)
    set_tests_properties(${NAME} PROPERTIES LABELS ${TEST_LABEL})
  endif()
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
