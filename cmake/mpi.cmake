# ladon::mpi, for programs that include ladon/mpi.h; where no MPI is found there is none. The library
# itself uses no MPI.
if(NOT TARGET ladon::mpi)
  set(MPI_CXX_SKIP_MPICXX TRUE)  # MPI's own C++ bindings are gone from the standard
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    add_library(ladon::mpi INTERFACE IMPORTED GLOBAL)
    target_link_libraries(ladon::mpi INTERFACE ladon::ladon MPI::MPI_CXX)
  endif()
endif()
