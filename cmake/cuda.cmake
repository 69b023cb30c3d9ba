# The CUDA backend: found by itself, or asked for.
set(LADON_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (where nvcc 12 or newer is), ON or OFF")
set_property(CACHE LADON_CUDA PROPERTY STRINGS AUTO ON OFF)

# Sets LADON_WITH_CUDA, and enables the language. A macro: languages are enabled in the caller's scope.
macro(ladon_find_cuda)
  set(LADON_WITH_CUDA OFF)
  if(LADON_CUDA STREQUAL "AUTO" OR LADON_CUDA)
    # Which GPUs the code is for is said below, in the flags of the files alone.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES OFF)
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
        set(ladon_no_cuda "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, older than 12")
      else()
        find_package(CUDAToolkit REQUIRED)
        set(LADON_WITH_CUDA ON)
      endif()
    else()
      set(ladon_no_cuda "no nvcc was found")
    endif()
    if(LADON_WITH_CUDA)
      message(STATUS "CUDA backend: built by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
    elseif(LADON_CUDA STREQUAL "AUTO")
      message(STATUS "CUDA backend: not built: ${ladon_no_cuda}")
    else()
      message(FATAL_ERROR "LADON_CUDA is ${LADON_CUDA}, but ${ladon_no_cuda}")
    endif()
  endif()
endmacro()

# Adds the backend's sources to `target`.
function(ladon_add_cuda target)
  if(NOT LADON_WITH_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE ${ARGN})
  target_compile_definitions(${target} PRIVATE LADON_WITH_CUDA)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  if(BUILD_SHARED_LIBS)
    # A program may have a CUDA runtime of its own, of another version.
    target_link_options(${target} PRIVATE LINKER:--exclude-libs,libcudart_static.a)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
  set(kernel_sources ${ARGN})
  list(FILTER kernel_sources INCLUDE REGEX "\\.cu$")
  foreach(source IN LISTS kernel_sources)
    if(source MATCHES "/hopper/")
      # Hopper's own instructions: for no other GPU, not even newer ones.
      set(code -gencode=arch=compute_90a,code=sm_90a)
    elseif(source MATCHES "/(forward|forward_bf16|forward_f16|kv_rows|norm|projection_decode|projection_decode_fma|rope|rope_append)\\.cu$")
      # Kernels of a decode step start before the one before them has ended, which takes instructions
      # that Ampere does not have (kernels/dependent_launch.cuh).
      set(code -gencode=arch=compute_80,code=[compute_80,sm_80]
        -gencode=arch=compute_90,code=sm_90)
    else()
      # One front-end pass for all: PTX of Ampere, and machine code of Ampere and Hopper from it.
      set(code -gencode=arch=compute_80,code=[compute_80,sm_80,sm_90])
    endif()
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${code})
  endforeach()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-std=c++20 --expt-relaxed-constexpr --extended-lambda -Xcompiler=-Wall,-Wextra>")
  # Careful kernels run where inputs hold NaN or infinity; elsewhere registers must suffice.
  set(hot_sources ${kernel_sources})
  list(FILTER hot_sources EXCLUDE REGEX "_careful_")
  set_property(SOURCE ${hot_sources} APPEND PROPERTY COMPILE_OPTIONS -Xptxas=--warn-on-spills)
  # What ptxas reports of Hopper's kernels is kept for the test hopper_ptxas, which need not compile them again.
  set(hopper_sources ${kernel_sources})
  list(FILTER hopper_sources INCLUDE REGEX "/hopper/")
  set_property(SOURCE ${hopper_sources} APPEND PROPERTY COMPILE_OPTIONS -Xptxas=-v)
  set_property(TARGET ${target} PROPERTY CUDA_COMPILER_LAUNCHER
    ${PROJECT_SOURCE_DIR}/tools/keep_ptxas_log.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
  if(LADON_WERROR)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")
  endif()
endfunction()
