# fusedstep_isa_objects(<out>): compiles the kernel sources once for each instruction set, and there once for each rule of the
# list. Returns the objects, those of the base first.

# fusedstep_rules(<out>): the names in the list of rules.
function(fusedstep_rules OUT)
  set(list "${PROJECT_SOURCE_DIR}/include/fusedstep/rules/list.h")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${list}")
  file(READ "${list}" text)
  string(REGEX MATCHALL "X\\([A-Za-z0-9]+\\)" entries "${text}")
  string(REGEX REPLACE "X\\(([A-Za-z0-9]+)\\)" "\\1" names "${entries}")
  set(${OUT} ${names} PARENT_SCOPE)
endfunction()

# fusedstep_kernels(NAME SOURCE ISA DEFINITIONS... OPTIONS options...): a source of the kernels, as an object library.
function(fusedstep_kernels NAME SOURCE ISA)
  cmake_parse_arguments(PARSE_ARGV 3 ARG "" "" "OPTIONS")
  add_library(${NAME} OBJECT "${PROJECT_SOURCE_DIR}/cpu_kernels/${SOURCE}")
  target_compile_definitions(${NAME} PRIVATE FUSEDSTEP_ISA=${ISA} ${ARG_UNPARSED_ARGUMENTS})
  # Kernels are optimised in every configuration: without inlining, vector code would leak through weak functions.
  # Contraction is off so that every instruction set rounds alike; what is to be fused says mul_add. The rounding mode
  # is the caller's: where it is not to nearest, -(a * b) is not (-a) * b.
  # GCC 12 warns of variables left undefined on purpose inside its own intrinsics, and notes at every register passed to a
  # function that older versions passed it otherwise: all of them inline.
  target_compile_options(${NAME} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi)
  # Under a sanitizer the compiler takes minutes for checks inline at every access, and for those of when each temporary that
  # stands for a register ends.
  set(level -O3)
  if(FUSEDSTEP_SANITIZE)
    set(level -fno-sanitize-address-use-after-scope
              $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>)
  endif()
  target_compile_options(${NAME} PRIVATE ${level} -ffp-contract=off -frounding-math -fno-math-errno -fno-trapping-math
                                         ${ARG_OPTIONS})
  target_link_libraries(${NAME} PRIVATE fusedstep_options torch::headers)
  set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  set(objects ${objects} $<TARGET_OBJECTS:${NAME}> PARENT_SCOPE)
endfunction()

# fusedstep_isa(NAME CAPABILITY options...): appends to `objects`. ATen's transpositions are those of its CPU_CAPABILITY.
function(fusedstep_isa NAME CAPABILITY)
  set(target fusedstep_kernels_${NAME})
  fusedstep_kernels(${target} table.cpp ${NAME} CPU_CAPABILITY=${CAPABILITY} CPU_CAPABILITY_${CAPABILITY} OPTIONS ${ARGN})
  foreach(rule ${FUSEDSTEP_RULES})
    fusedstep_kernels(${target}_${rule} rule.cpp ${NAME} FUSEDSTEP_RULE=${rule} OPTIONS ${ARGN})
  endforeach()
  set(objects ${objects} PARENT_SCOPE)
endfunction()

function(fusedstep_isa_objects OUT)
  # Half of the time that kernels take to compile for sanitizers would go into asking for the alignment of each access, which
  # the instructions do not need. An option of the source comes after those that ask for the checks.
  if(FUSEDSTEP_SANITIZE)
    set_source_files_properties(cpu_kernels/rule.cpp cpu_kernels/table.cpp PROPERTIES COMPILE_OPTIONS -fno-sanitize=alignment)
  endif()
  fusedstep_rules(FUSEDSTEP_RULES)
  set(objects)
  fusedstep_isa(base DEFAULT)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    fusedstep_isa(avx2 AVX2 -mavx2 -mfma -mf16c)
    fusedstep_isa(avx512 AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
    set_source_files_properties(src/isa.cpp PROPERTIES COMPILE_DEFINITIONS "FUSEDSTEP_HAVE_AVX2;FUSEDSTEP_HAVE_AVX512")
  endif()
  message(STATUS "CPU kernels are compiled for each instruction set, which takes minutes")
  set(${OUT} ${objects} PARENT_SCOPE)
endfunction()
