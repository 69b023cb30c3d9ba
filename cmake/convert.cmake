# Conversion between kinds of attention needs Eigen: found by itself, or asked for.
set(LADON_CONVERT AUTO CACHE STRING "Build the conversions of layers: AUTO (where Eigen 3.4 is), ON or OFF")
set_property(CACHE LADON_CONVERT PROPERTY STRINGS AUTO ON OFF)

# Sets LADON_WITH_CONVERT. A macro: Eigen3::Eigen is for the tests too.
macro(ladon_find_eigen)
  set(LADON_WITH_CONVERT OFF)
  if(LADON_CONVERT STREQUAL "AUTO")
    find_package(Eigen3 3.4 QUIET NO_MODULE)
  elseif(LADON_CONVERT)
    find_package(Eigen3 3.4 REQUIRED NO_MODULE)
  endif()
  if((LADON_CONVERT STREQUAL "AUTO" AND Eigen3_FOUND) OR
     (LADON_CONVERT AND NOT LADON_CONVERT STREQUAL "AUTO"))
    set(LADON_WITH_CONVERT ON)
    message(STATUS "Conversions: built with Eigen ${Eigen3_VERSION}")
  else()
    message(STATUS "Conversions: not built: no Eigen 3.4 was found, or LADON_CONVERT is OFF")
  endif()
endmacro()

# ladon_add_convert(target otherwise sources...): the conversions, or without Eigen the functions that
# refuse. Only these files see Eigen: its inline functions must not meet the kernels' flags, and
# users of the installed library do not need it.
function(ladon_add_convert target otherwise)
  if(NOT LADON_WITH_CONVERT)
    target_sources(${target} PRIVATE ${otherwise})
    return()
  endif()
  get_target_property(include Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "-isystem;${include}")
  target_sources(${target} PRIVATE ${ARGN})
endfunction()
