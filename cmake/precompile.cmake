# The standard headers, compiled once for a target instead of once for each of its files: a third of
# the time of most. Only where it is asked for (the preset `release`): without it, as in the other
# presets, a file that forgets an include does not compile.
option(LADON_PRECOMPILE "Precompile the standard headers: a faster build" OFF)

# ladon_precompile(target EXCEPT regular-expression): files that match have flags of their own.
function(ladon_precompile target except expression)
  # A compiler cache needs settings of its own to see through precompiled headers.
  if(NOT LADON_PRECOMPILE OR CMAKE_CXX_COMPILER_LAUNCHER)
    return()
  endif()
  # CMake makes them for C++ alone: nvcc has none.
  foreach(header IN ITEMS algorithm array atomic cmath functional memory mutex optional span string
      unordered_map vector)
    target_precompile_headers(${target} PRIVATE <${header}>)
  endforeach()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # The false alarm that warnings.cmake names, by other names where std::string is precompiled.
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow;-Wno-array-bounds>")
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "${expression}")
  set_source_files_properties(${sources} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endfunction()
