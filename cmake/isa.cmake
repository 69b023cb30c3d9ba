# The instruction sets that kernels are compiled for: "name:flags". Each has src/cpu/isa/<name>.cpp.
# The flags here and the CPU features that src/cpu/dispatch.cpp asks for must agree.
set(LADON_ISAS
  "baseline:"
  "avx2:-mavx2 -mfma -mf16c"
  "avx512:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
  "avx512_bf16:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mfma -mf16c -mprefer-vector-width=512"
  "amx:-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mfma -mf16c -mprefer-vector-width=512")

# Adds each instruction set's translation unit to `target`, with its own flags.
function(ladon_add_isas target)
  foreach(entry IN LISTS LADON_ISAS)
    string(REGEX MATCH "^([^:]+):(.*)$" _ "${entry}")
    set(source "cpu/isa/${CMAKE_MATCH_1}.cpp")
    # Kernels are always optimised: unoptimised, their inline helpers would leave the unit as
    # symbols that code for older CPUs could link to, and tests would take hours.
    # Under a sanitizer -O1 is enough of that, and -O3 takes minutes a file.
    if(LADON_SANITIZE)
      set(level -O1)
    else()
      set(level -O3)
    endif()
    separate_arguments(flags UNIX_COMMAND
      "${CMAKE_MATCH_2} ${level} -fno-math-errno -fno-trapping-math")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # GCC 12's own AVX-512 headers start from "undefined" vectors, which it then warns about.
      list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
      # GCC stops inlining into a unit that has grown by 40 %. A unit has all kernels of its set, so
      # that code added to one kernel took calls into the loops of others (f32 backward: 1 to 3 %).
      list(APPEND flags --param=inline-unit-growth=1000)
    endif()
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}")
    target_sources(${target} PRIVATE ${source})
  endforeach()
endfunction()
