# What a package of the program holds (`cmake --install … --component fathom`, tools/make_package.sh).
# The manual page and the completions are printed by the program itself, from its flags.
include(GNUInstallDirs)

set(DOCUMENTS ${CMAKE_BINARY_DIR}/documents)
set(MADE)
foreach(ENTRY "man fathom.1" "bash fathom.bash" "zsh _fathom" "fish fathom.fish")
  separate_arguments(ENTRY)
  list(GET ENTRY 0 WHAT)
  list(GET ENTRY 1 FILE)
  add_custom_command(OUTPUT ${DOCUMENTS}/${FILE}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${DOCUMENTS}
    COMMAND fathom generate ${WHAT} > ${DOCUMENTS}/${FILE}
    DEPENDS fathom VERBATIM)
  list(APPEND MADE ${DOCUMENTS}/${FILE})
endforeach()
add_custom_target(documents DEPENDS ${MADE})

set(SHARE ${CMAKE_INSTALL_DATADIR})
install(TARGETS fathom DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT fathom)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/fathom-tiny DESTINATION ${SHARE}/fathom/models COMPONENT fathom)
install(FILES ${DOCUMENTS}/fathom.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT fathom)
install(FILES ${DOCUMENTS}/fathom.bash DESTINATION ${SHARE}/bash-completion/completions RENAME fathom
  COMPONENT fathom)
install(FILES ${DOCUMENTS}/_fathom DESTINATION ${SHARE}/zsh/vendor-completions COMPONENT fathom)
install(FILES ${DOCUMENTS}/fathom.fish DESTINATION ${SHARE}/fish/vendor_completions.d COMPONENT fathom)
install(FILES ${CMAKE_SOURCE_DIR}/README.md DESTINATION ${SHARE}/doc/fathom COMPONENT fathom)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs/ DESTINATION ${SHARE}/doc/fathom COMPONENT fathom
  FILES_MATCHING PATTERN "*.md" PATTERN kernels EXCLUDE PATTERN images EXCLUDE)
foreach(FILE LICENSE CHANGELOG.md)
  install(FILES ${CMAKE_SOURCE_DIR}/${FILE} DESTINATION ${SHARE}/doc/fathom COMPONENT fathom OPTIONAL)
endforeach()
