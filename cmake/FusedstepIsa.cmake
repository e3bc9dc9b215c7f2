# fusedstep_isa_objects(<out>): compiles the kernel sources once per instruction set and returns the objects, those of
# the base first. ATen's vector classes choose their width by CPU_CAPABILITY.

function(fusedstep_isa NAME CAPABILITY)
  add_library(fusedstep_kernels_${NAME} OBJECT "${PROJECT_SOURCE_DIR}/cpu_kernels/instantiate.cpp")
  target_compile_definitions(
    fusedstep_kernels_${NAME} PRIVATE FUSEDSTEP_ISA=${NAME} CPU_CAPABILITY=${CAPABILITY} CPU_CAPABILITY_${CAPABILITY})
  # Kernels are optimised in every configuration: without inlining, vector code would leak through weak functions.
  # Contraction is off so that every instruction set rounds alike; what is to be fused says mul_add. The rounding mode
  # is the caller's: where it is not to nearest, -(a * b) is not (-a) * b.
  # GCC 12 warns of variables left undefined on purpose inside its own intrinsics, and notes at every register passed to a
  # function that older versions passed it otherwise: all of them inline.
  target_compile_options(fusedstep_kernels_${NAME} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi)
  # Under a sanitizer the compiler takes minutes for checks inline at every access, and for those of when each temporary that
  # stands for a register ends.
  set(level -O3)
  if(FUSEDSTEP_SANITIZE)
    set(level -fno-sanitize-address-use-after-scope
              $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>)
  endif()
  target_compile_options(fusedstep_kernels_${NAME} PRIVATE ${level} -ffp-contract=off -frounding-math -fno-math-errno
                                                           -fno-trapping-math ${ARGN})
  target_link_libraries(fusedstep_kernels_${NAME} PRIVATE fusedstep_options torch::headers)
  set_target_properties(fusedstep_kernels_${NAME} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(fusedstep_isa_objects OUT)
  # Half of the time that kernels take to compile for sanitizers would go into asking for the alignment of each access, which
  # the instructions do not need. An option of the source comes after those that ask for the checks.
  if(FUSEDSTEP_SANITIZE)
    set_source_files_properties(cpu_kernels/instantiate.cpp PROPERTIES COMPILE_OPTIONS -fno-sanitize=alignment)
  endif()
  fusedstep_isa(base DEFAULT)
  set(objects $<TARGET_OBJECTS:fusedstep_kernels_base>)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    fusedstep_isa(avx2 AVX2 -mavx2 -mfma -mf16c)
    fusedstep_isa(avx512 AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
    list(APPEND objects $<TARGET_OBJECTS:fusedstep_kernels_avx2> $<TARGET_OBJECTS:fusedstep_kernels_avx512>)
    set_source_files_properties(src/isa.cpp PROPERTIES COMPILE_DEFINITIONS "FUSEDSTEP_HAVE_AVX2;FUSEDSTEP_HAVE_AVX512")
  endif()
  message(STATUS "CPU kernels are compiled for each instruction set, which takes minutes")
  set(${OUT} ${objects} PARENT_SCOPE)
endfunction()
