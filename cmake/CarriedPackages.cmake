# What the rooms below the server take from Debian's packages, from the folder that
# tools/carry_packages.sh has filled: for GPU machines that have CUDA, CMake and g++ alone. Headers
# and static libraries; fmt and spdlog, which Debian has as shared libraries only, by their headers.

find_package(Threads REQUIRED)

# carried(TARGET [LIBRARY file] [DEFINITIONS …] [DEPS …])
function(carried TARGET)
  cmake_parse_arguments(CARRIED "" "LIBRARY" "DEFINITIONS;DEPS" ${ARGN})
  add_library(${TARGET} INTERFACE IMPORTED GLOBAL)
  set(LIBRARY "")
  if(CARRIED_LIBRARY)
    set(LIBRARY ${FATHOM_CARRIED}/lib/${CARRIED_LIBRARY})
    if(NOT EXISTS ${LIBRARY})
      message(FATAL_ERROR "${LIBRARY} is missing: unpack build/carried.tar.gz (make gpu-carry) here.")
    endif()
  endif()
  set_target_properties(${TARGET} PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${FATHOM_CARRIED}/include
    INTERFACE_COMPILE_DEFINITIONS "${CARRIED_DEFINITIONS}"
    INTERFACE_LINK_LIBRARIES "${LIBRARY};${CARRIED_DEPS}")
endfunction()

carried(fmt::fmt DEFINITIONS FMT_HEADER_ONLY=1)
carried(spdlog::spdlog DEFINITIONS SPDLOG_FMT_EXTERNAL DEPS fmt::fmt)
carried(tl::expected)
carried(Boost::json LIBRARY libboost_json.a)
carried(PkgConfig::PCRE2 LIBRARY libpcre2-8.a)
carried(GTest::gtest LIBRARY libgtest.a DEPS Threads::Threads)
carried(GTest::gtest_main LIBRARY libgtest_main.a DEPS GTest::gtest)
