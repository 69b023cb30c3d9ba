# One step of the tests of installation: cmake -D STEP=... -D ... -P run.cmake. See CMakeLists.txt.
cmake_minimum_required(VERSION 3.22)

set(prefix ${WORK_DIR}/prefix)

function(run)
  list(JOIN ARGN " " line)
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Configures, builds and runs the project in this directory's folder `name`.
function(build_consumer name)
  set(build ${WORK_DIR}/${name})
  run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/${name} -B ${build} -G ${GENERATOR}
      -D CMAKE_BUILD_TYPE=${CONFIG} -D CMAKE_CXX_COMPILER=${CXX} ${ARGN})
  run(${CMAKE_COMMAND} --build ${build} --config ${CONFIG} --parallel)
  run(${build}/consumer)
endfunction()

if(STEP STREQUAL "install")
  file(REMOVE_RECURSE ${prefix})
  run(${CMAKE_COMMAND} --install ${LADON_BINARY_DIR} --config ${CONFIG} --prefix ${prefix})

  # The public headers, all of them and nothing else.
  file(GLOB_RECURSE installed RELATIVE ${prefix}/${INCLUDEDIR} ${prefix}/${INCLUDEDIR}/*)
  file(GLOB expected RELATIVE ${LADON_SOURCE_DIR}/include ${LADON_SOURCE_DIR}/include/ladon/*.h)
  list(SORT installed)
  list(SORT expected)
  if(NOT installed STREQUAL expected)
    message(FATAL_ERROR "installed headers: ${installed}\nexpected: ${expected}")
  endif()
  # The command, which says that it is this version.
  if(CLI)
    execute_process(COMMAND ${prefix}/${BINDIR}/ladon --version
      OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
    if(NOT version STREQUAL "ladon ${LADON_VERSION}\n")
      message(FATAL_ERROR "the installed command says: ${version}")
    endif()
    run(${prefix}/${BINDIR}/ladon info)
  endif()
  # And no file outside these places.
  file(GLOB_RECURSE rest RELATIVE ${prefix} ${prefix}/*)
  list(FILTER rest EXCLUDE REGEX
    "^(${INCLUDEDIR}/ladon/|${LIBDIR}/cmake/ladon/|${LIBDIR}/pkgconfig/ladon\\.pc$|${LIBDIR}/libladon\\.|${BINDIR}/ladon$|share/doc/ladon/copyright$|share/man/man1/ladon\\.1$|share/bash-completion/completions/ladon$|share/zsh/vendor-completions/_ladon$|share/fish/vendor_completions\\.d/ladon\\.fish$)")
  if(rest)
    message(FATAL_ERROR "unexpected files installed: ${rest}")
  endif()

elseif(STEP STREQUAL "libdir")
  # -D CMAKE_INSTALL_LIBDIR=lib64, without a type, is a folder of the prefix.
  set(build ${WORK_DIR}/libdir)
  file(REMOVE_RECURSE ${build})
  run(${CMAKE_COMMAND} -S ${LADON_SOURCE_DIR} -B ${build} -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX}
      -D CMAKE_INSTALL_LIBDIR=lib64 -D LADON_CUDA=OFF -D LADON_CLI=OFF -D LADON_TESTS=OFF
      -D LADON_EXAMPLES=OFF)
  file(READ ${build}/cmake_install.cmake script)
  string(FIND "${script}" [[DESTINATION "${CMAKE_INSTALL_PREFIX}/lib64/pkgconfig"]] place)
  if(place EQUAL -1)
    message(FATAL_ERROR "ladon.pc does not go to lib64 of the prefix: see ${build}/cmake_install.cmake")
  endif()

elseif(STEP STREQUAL "find_package")
  build_consumer(find_package -D CMAKE_PREFIX_PATH=${prefix} -D EXPECTED_VERSION=${LADON_VERSION})

elseif(STEP STREQUAL "pkg_config")
  find_program(pkg_config pkg-config)
  if(NOT pkg_config)
    message("skipped: no pkg-config here")
    return()
  endif()
  set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
  execute_process(COMMAND ${pkg_config} --cflags --libs ladon
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CXX} -std=c++20 -DEXPECTED_VERSION="${LADON_VERSION}"
      ${CMAKE_CURRENT_LIST_DIR}/find_package/main.cpp -o ${WORK_DIR}/pkg_config_consumer ${flags}
      -Wl,-rpath,${prefix}/${LIBDIR})
  run(${WORK_DIR}/pkg_config_consumer)

elseif(STEP STREQUAL "deb")
  find_program(dpkg dpkg-deb)
  if(NOT dpkg)
    message("skipped: no dpkg-deb here")
    return()
  endif()
  set(packed ${WORK_DIR}/deb)
  file(REMOVE_RECURSE ${packed})
  file(MAKE_DIRECTORY ${packed})
  execute_process(COMMAND ${CPACK} --config ${LADON_BINARY_DIR}/CPackConfig.cmake -B ${packed}
    WORKING_DIRECTORY ${packed} COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB package ${packed}/ladon_${LADON_VERSION}*.deb)
  run(${dpkg} --info ${package})
  execute_process(COMMAND ${dpkg} --field ${package} Maintainer
    OUTPUT_VARIABLE maintainer COMMAND_ERROR_IS_FATAL ANY)
  if(NOT maintainer MATCHES "^[^<]+ <[^@]+@[^>]+>\n$")
    message(FATAL_ERROR "the maintainer has no address: ${maintainer}")
  endif()
  run(${dpkg} --extract ${package} ${packed}/tree)
  if(EXISTS /etc/debian_version AND NOT EXISTS ${packed}/tree/usr/lib/${ARCHITECTURE}/pkgconfig/ladon.pc)
    message(FATAL_ERROR "not in Debian's folder of libraries: lib/${ARCHITECTURE}, but in ${LIBDIR}")
  endif()
  if(CLI)
    run(${packed}/tree/usr/bin/ladon plan --model deepseek-v3)
  endif()
  set(WORK_DIR ${packed})
  build_consumer(find_package
    -D CMAKE_PREFIX_PATH=${packed}/tree/usr -D EXPECTED_VERSION=${LADON_VERSION})

elseif(STEP STREQUAL "add_subdirectory")
  string(TOUPPER "${CONFIG}" config)
  # Shared, since the installed tree is static: both kinds are then known to link. The folder is
  # kept, so that only the first run compiles the library. Without CUDA, which takes minutes, and hardly
  # optimised: this is about linking, and the other tests run what is shipped.
  build_consumer(add_subdirectory -D LADON_SOURCE_DIR=${LADON_SOURCE_DIR} -D BUILD_SHARED_LIBS=ON
    -D LADON_CUDA=OFF -D LADON_PRECOMPILE=ON -D LADON_KERNEL_LEVEL=-O1
    "-DCMAKE_CXX_FLAGS_${config}=-O1 -DNDEBUG")

else()
  message(FATAL_ERROR "STEP is '${STEP}'")
endif()
