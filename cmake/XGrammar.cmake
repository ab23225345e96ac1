# The library `xgrammar`: token masks from grammars (Apache 2.0), built from its pinned sources.
#
# Its own CMake project sets flags for everything around it and builds what is not needed here, so
# the sources are named directly. Optimised in every build, because a mask is computed between two
# steps; under a sanitizer it is instrumented as the rest is, since it reads what users write.
execute_process(
  COMMAND ${CMAKE_SOURCE_DIR}/tools/fetch_xgrammar.sh ${CMAKE_SOURCE_DIR}/build/third_party
  OUTPUT_VARIABLE XGRAMMAR_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE XGRAMMAR_FETCHED)
if(NOT XGRAMMAR_FETCHED EQUAL 0)
  message(FATAL_ERROR "XGrammar's sources are missing; the reason stands above.")
endif()

file(GLOB XGRAMMAR_SOURCES ${XGRAMMAR_DIR}/cpp/*.cc ${XGRAMMAR_DIR}/cpp/support/*.cc
     ${XGRAMMAR_DIR}/cpp/converter_ext/*.cc)
add_library(xgrammar STATIC ${XGRAMMAR_SOURCES})
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17 EXPORT_COMPILE_COMMANDS OFF UNITY_BUILD ON)
target_compile_options(xgrammar PRIVATE -w -O2 -g0)
# Its messages go where src/grammar/xgrammar_messages.cc takes them.
target_compile_definitions(xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0
  XGRAMMAR_ENABLE_INTERNAL_CHECK=0 XGRAMMAR_LOG_CUSTOMIZE=1)
# Less time to build: what only turns a schema into a grammar's text, and the larger files that no
# grammar of ours comes through.
foreach(ONCE json_schema_converter structural_tag grammar_parser grammar_builder regex_converter)
  set_source_files_properties(${XGRAMMAR_DIR}/cpp/${ONCE}.cc PROPERTIES COMPILE_OPTIONS -O1)
endforeach()
foreach(UNUSED lark_converter grammar_printer converter_ext/cohere converter_ext/minimax_m3)
  set_source_files_properties(${XGRAMMAR_DIR}/cpp/${UNUSED}.cc PROPERTIES COMPILE_OPTIONS -O0)
endforeach()
target_include_directories(xgrammar SYSTEM PUBLIC ${XGRAMMAR_DIR}/include
                           ${XGRAMMAR_DIR}/3rdparty/dlpack/include)
target_include_directories(xgrammar SYSTEM PRIVATE ${XGRAMMAR_DIR}/3rdparty/picojson)
if(FATHOM_SANITIZE)
  target_compile_options(xgrammar PRIVATE -fsanitize=${FATHOM_SANITIZE} -fno-omit-frame-pointer)
endif()
if(FATHOM_FUZZ)
  target_compile_options(xgrammar PRIVATE -fsanitize=fuzzer-no-link)
endif()
