# Fails when a .cpp or .cu file below src, cli, python, tests, bench or examples is not named in the
# CMakeLists.txt nearest to it (or, for kernels, in the list of cmake/isa.cmake): such a file is
# silently not built.
# Usage: cmake -P check_sources.cmake
cmake_minimum_required(VERSION 3.22)

get_filename_component(root ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
include(${root}/cmake/isa.cmake)
foreach(entry IN LISTS LADON_ISAS)
  string(REGEX REPLACE ":.*$" "" name "${entry}")
  list(APPEND named_elsewhere src/cpu/isa/${name}.cpp)
endforeach()

foreach(folder src cli python tests bench examples)
  file(GLOB_RECURSE found RELATIVE ${root} ${root}/${folder}/*.cpp
    ${root}/${folder}/*.cu)
  list(APPEND sources ${found})
endforeach()

set(lost "")
foreach(source IN LISTS sources)
  get_filename_component(folder ${source} DIRECTORY)
  while(NOT EXISTS ${root}/${folder}/CMakeLists.txt)
    get_filename_component(folder ${folder} DIRECTORY)
  endwhile()
  file(READ ${root}/${folder}/CMakeLists.txt text)
  string(REGEX REPLACE "#[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[ \t\r\n()]+" ";" words "${text}")
  file(RELATIVE_PATH name ${root}/${folder} ${root}/${source})
  if(NOT name IN_LIST words AND NOT source IN_LIST named_elsewhere)
    list(APPEND lost "${source} is not named in ${folder}/CMakeLists.txt")
  endif()
endforeach()

list(LENGTH sources count)
if(lost)
  list(JOIN lost "\n  " lost)
  message(FATAL_ERROR "not built:\n  ${lost}")
endif()
message(STATUS "${count} sources, all of them named")
