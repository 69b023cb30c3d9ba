# vcpkg install ladon --overlay-ports=packaging/vcpkg builds the checkout that this file is in.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS options
  FEATURES
    convert LADON_CONVERT
    command LADON_CLI)

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${options}
    -DCMAKE_INSTALL_LIBDIR=lib
    -DLADON_CUDA=OFF
    -DLADON_CAIRO=OFF
    -DLADON_TESTS=OFF
    -DLADON_EXAMPLES=OFF
    -DLADON_PYTHON=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/ladon)
vcpkg_fixup_pkgconfig()
vcpkg_copy_pdbs()
if("command" IN_LIST FEATURES AND NOT VCPKG_LIBRARY_LINKAGE STREQUAL "dynamic")
  vcpkg_copy_tools(TOOL_NAMES ladon AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
