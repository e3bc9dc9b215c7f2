# The CMake package of the library, for find_package(fusedstep): what is installed of it, and one of the build itself.

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/fusedstepConfig.cmake.in" "${PROJECT_BINARY_DIR}/fusedstepConfig.cmake"
  INSTALL_DESTINATION . NO_SET_AND_CHECK_MACRO)  # no file of it has a path
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fusedstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
set(FUSEDSTEP_PACKAGE_FILES "${PROJECT_BINARY_DIR}/fusedstepConfig.cmake" "${PROJECT_BINARY_DIR}/fusedstepConfigVersion.cmake"
                            "${PROJECT_SOURCE_DIR}/cmake/FusedstepTorch.cmake")

# fusedstep_install(<component> <library folder> <include folder> <package folder> [option...]): options of install().
function(fusedstep_install COMPONENT LIBRARY INCLUDE PACKAGE)
  set(options COMPONENT ${COMPONENT} ${ARGN})
  set(targets fusedstep_${COMPONENT}_targets)
  install(TARGETS fusedstep fusedstep_optim EXPORT ${targets} LIBRARY DESTINATION ${LIBRARY} ${options}
          INCLUDES DESTINATION ${INCLUDE})
  install(EXPORT ${targets} NAMESPACE fusedstep:: FILE fusedstepTargets.cmake DESTINATION ${PACKAGE} ${options})
  install(FILES ${FUSEDSTEP_PACKAGE_FILES} DESTINATION ${PACKAGE} ${options})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/fusedstep" DESTINATION ${INCLUDE} ${options})
endfunction()

# fusedstep_package_in_place(<folder>): a package there, of the library as it is built and the headers of the checkout.
function(fusedstep_package_in_place FOLDER)
  export(TARGETS fusedstep fusedstep_optim NAMESPACE fusedstep:: FILE "${FOLDER}/fusedstepTargets.cmake")
  file(COPY ${FUSEDSTEP_PACKAGE_FILES} DESTINATION "${FOLDER}")
endfunction()
