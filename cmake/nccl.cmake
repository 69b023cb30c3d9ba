# ladon::nccl, for programs that include ladon/nccl.h; where NCCL or the CUDA runtime is not found
# there is none. The library itself uses no NCCL.
if(NOT TARGET ladon::nccl)
  find_package(CUDAToolkit QUIET)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR})
  mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
  if(CUDAToolkit_FOUND AND NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
    add_library(ladon::nccl INTERFACE IMPORTED GLOBAL)
    target_include_directories(ladon::nccl INTERFACE ${NCCL_INCLUDE_DIR})
    target_link_libraries(ladon::nccl INTERFACE ladon::ladon ${NCCL_LIBRARY} CUDA::cudart_static)
  endif()
endif()
