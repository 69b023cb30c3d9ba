# Warnings, sanitizers and the other flags that only our own targets get.
function(ladon_target_flags target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  # For C++; cmake/cuda.cmake says what nvcc is given.
  set(options
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wdouble-promotion
    -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wold-style-cast -Wformat=2 -Wundef)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # False alarms of GCC 12 in its own std::string: "text" + std::to_string(n) (GCC bug 105651).
    list(APPEND options -Wno-restrict)
  endif()
  if(LADON_WERROR)
    list(APPEND options -Werror)
  endif()
  if(LADON_SANITIZE)
    # -O1 keeps stack traces honest and the suite bearable.
    list(APPEND options
      -fsanitize=${LADON_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${LADON_SANITIZE})
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${options}>")
endfunction()
