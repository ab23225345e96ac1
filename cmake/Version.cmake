# Writes which version and commit is built, as C++ source (run with cmake -P at each build, as the
# commit changes without a reconfiguration), or prints the version.
#
#   SOURCE_DIR       the project
#   PROJECT_VERSION  what holds where no tag says more
#   FATHOM_COMMIT    the commit where the sources come without their history
#   CUDA_VERSION     of the toolkit; empty: built without it
#   OUTPUT           the file to write, only if it changes; without it the version is printed
#
# At a tag v1.2.3 the version is 1.2.3, five commits later 1.2.3+5.g0123abc, and without a tag that of
# the project. Without git the commit is what `git archive` has put into cmake/commit.txt.
set(VERSION ${PROJECT_VERSION})
set(COMMIT "unknown")

find_program(GIT git)
set(FROM_GIT FALSE)
if(GIT AND EXISTS ${SOURCE_DIR}/.git)
  execute_process(COMMAND ${GIT} rev-parse HEAD WORKING_DIRECTORY ${SOURCE_DIR}
    OUTPUT_VARIABLE HEAD OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE FAILED)
  if(NOT FAILED)
    set(FROM_GIT TRUE)
    set(COMMIT ${HEAD})
    execute_process(COMMAND ${GIT} describe --tags --match "v[0-9]*" --abbrev=7
      WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE DESCRIBED
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE FAILED)
    execute_process(COMMAND ${GIT} status --porcelain --untracked-files=no
      WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE CHANGES ERROR_QUIET)
    if(CHANGES)
      string(APPEND COMMIT ", changed")
    endif()
  endif()
endif()
if(NOT FROM_GIT AND FATHOM_COMMIT)
  set(COMMIT ${FATHOM_COMMIT})
elseif(NOT FROM_GIT)
  file(READ ${SOURCE_DIR}/cmake/commit.txt ARCHIVED)
  # "<commit> <described>", each as git archive found it.
  string(STRIP "${ARCHIVED}" ARCHIVED)
  if(ARCHIVED MATCHES "^([0-9a-f]+) ?(.*)$")
    set(COMMIT ${CMAKE_MATCH_1})
    set(DESCRIBED ${CMAKE_MATCH_2})
  endif()
endif()
if(DESCRIBED MATCHES "^v([0-9][^-]*)-([0-9]+)-(g[0-9a-f]+)$")
  set(VERSION ${CMAKE_MATCH_1}+${CMAKE_MATCH_2}.${CMAKE_MATCH_3})
elseif(DESCRIBED MATCHES "^v([0-9].*)$")
  set(VERSION ${CMAKE_MATCH_1})
endif()

if(NOT OUTPUT)
  execute_process(COMMAND ${CMAKE_COMMAND} -E echo ${VERSION})
  return()
endif()
set(TEXT "// Made by cmake/Version.cmake.
#include \"base/version.h\"

namespace fathom {

const char* program_version() { return \"${VERSION}\"; }
const char* program_commit() { return \"${COMMIT}\"; }
const char* program_cuda() { return \"${CUDA_VERSION}\"; }

}  // namespace fathom
")
set(BEFORE "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} BEFORE)
endif()
if(NOT BEFORE STREQUAL TEXT)
  file(WRITE ${OUTPUT} "${TEXT}")
endif()
