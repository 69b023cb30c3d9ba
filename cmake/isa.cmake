# The instruction sets that kernels are compiled for: "name:flags". Each has src/cpu/isa/<name>.cpp.
# The flags here and the CPU features that src/cpu/dispatch.cpp asks for must agree.
set(LADON_ISAS
  "baseline:"
  "avx2:-mavx2 -mfma -mf16c"
  "avx512:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
  "avx512_bf16:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mfma -mf16c -mprefer-vector-width=512"
  "amx:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mfma -mf16c -mprefer-vector-width=512")

set(LADON_KERNEL_LEVEL "" CACHE STRING
  "How kernels are optimised, -O1 at least; if empty -O3, and -O1 under sanitizers")
mark_as_advanced(LADON_KERNEL_LEVEL)

# Adds each instruction set's translation unit to `target`, with its own flags.
function(ladon_add_isas target)
  # Kernels are always optimised: unoptimised, their inline helpers would leave the unit as symbols
  # that code for older CPUs could link to, and tests would take hours. Under a sanitizer -O1 is enough
  # of that, and -O3 takes minutes a file.
  set(level ${LADON_KERNEL_LEVEL})
  if(NOT level AND LADON_SANITIZE)
    set(level -O1)
  elseif(NOT level)
    set(level -O3)
  endif()
  foreach(entry IN LISTS LADON_ISAS)
    string(REGEX MATCH "^([^:]+):(.*)$" _ "${entry}")
    set(source "cpu/isa/${CMAKE_MATCH_1}.cpp")
    separate_arguments(flags UNIX_COMMAND
      "${CMAKE_MATCH_2} ${level} -fno-math-errno -fno-trapping-math")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # GCC 12's own AVX-512 headers start from "undefined" vectors, which it then warns about.
      list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
      if(LADON_SANITIZE)
        # Checks of addresses as calls, not inlined, and one pass over registers: half the time to compile.
        list(APPEND flags --param=asan-instrumentation-with-call-threshold=0 -fira-region=one)
      else()
        # GCC stops inlining into a unit that has grown by 40 %. A unit has all kernels of its set, so
        # that code added to one kernel took calls into the loops of others (f32 backward: 1 to 3 %).
        list(APPEND flags --param=inline-unit-growth=1000)
      endif()
    endif()
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}")
    target_sources(${target} PRIVATE ${source})
  endforeach()
endfunction()
