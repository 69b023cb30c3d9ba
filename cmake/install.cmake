# The installed tree: the library, include/ladon, the CMake package `ladon`, ladon.pc, and the command
# where it is built. All of it finds itself by relative paths, so that the tree can be moved.
include(CMakePackageConfigHelpers)

set(LADON_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/ladon)

install(TARGETS ladon EXPORT ladon-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET ladon_cli)
  install(TARGETS ladon_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY include/ladon DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(EXPORT ladon-targets NAMESPACE ladon:: DESTINATION ${LADON_CMAKE_DIR})

configure_package_config_file(cmake/ladon-config.cmake.in ladon-config.cmake
  INSTALL_DESTINATION ${LADON_CMAKE_DIR})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(ladon-config-version.cmake COMPATIBILITY SameMinorVersion)
foreach(engine mpi nccl)
  install(FILES cmake/${engine}.cmake DESTINATION ${LADON_CMAKE_DIR} RENAME ladon-${engine}.cmake)
endforeach()
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/ladon-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/ladon-config-version.cmake
  DESTINATION ${LADON_CMAKE_DIR})

# ladon.pc names its directories relative to its own.
file(RELATIVE_PATH LADON_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH LADON_PC_LIBDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH LADON_PC_INCLUDEDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
if(BUILD_SHARED_LIBS)
  set(LADON_PC_LIBS "")
else()
  set(LADON_PC_LIBS " -pthread")
  if(LADON_WITH_CUDA)
    get_target_property(ladon_cudart CUDA::cudart_static IMPORTED_LOCATION)
    string(APPEND LADON_PC_LIBS " ${ladon_cudart} -ldl -lrt")
  endif()
endif()
configure_file(cmake/ladon.pc.in ladon.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ladon.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
