# Headers compiled once for a target, or for all tests, instead of once for each file: a third of the
# time of most. Only where it is asked for (the presets `release`, `asan` and `tsan`): without it, as in
# the other presets, a file that forgets an include does not compile.
option(LADON_PRECOMPILE "Precompile the standard headers, and GoogleTest's for the tests: a faster build" OFF)

# Sets `result` to whether headers are precompiled for `target`, which then gets the flags that take.
function(ladon_can_precompile target result)
  # A compiler cache needs settings of its own to see through precompiled headers, and libFuzzer's
  # programs have flags of their own.
  if(NOT LADON_PRECOMPILE OR CMAKE_CXX_COMPILER_LAUNCHER OR LADON_FUZZ)
    set(${result} OFF PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # The false alarm that warnings.cmake names, by other names where std::string is precompiled.
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow;-Wno-array-bounds>")
  endif()
  set(${result} ON PARENT_SCOPE)
endfunction()

# ladon_precompile(target EXCEPT regular-expression [ALSO headers...]): the standard headers and those
# named; files that match have flags of their own.
function(ladon_precompile target except expression)
  ladon_can_precompile(${target} can)
  if(NOT can)
    return()
  endif()
  list(REMOVE_ITEM ARGN ALSO)
  # CMake makes them for C++ alone: nvcc has none.
  foreach(header IN ITEMS algorithm array atomic cmath functional memory mutex optional span string
      unordered_map vector ${ARGN})
    target_precompile_headers(${target} PRIVATE <${header}>)
  endforeach()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "${expression}")
  set_source_files_properties(${sources} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# ladon_reuse_precompiled(target from): those of another target, which has the same flags.
function(ladon_reuse_precompiled target from)
  ladon_can_precompile(${target} can)
  if(can)
    target_precompile_headers(${target} REUSE_FROM ${from})
  endif()
endfunction()
