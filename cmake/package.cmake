# The Debian package: the command, the library and its headers. `./dev package`, or cpack in a build
# folder.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ladon)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_DEBIAN_PACKAGE_MAINTAINER
  "Ladon maintainers <maintainers@users.noreply.a-seed-25367b1a.example>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
# What the programs are linked to, read from them; without that tool, as they are always linked.
find_program(LADON_DPKG_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(LADON_DPKG_SHLIBDEPS)
if(LADON_DPKG_SHLIBDEPS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libgcc-s1, libstdc++6")
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/ladon
  RENAME copyright)
include(CPack)
