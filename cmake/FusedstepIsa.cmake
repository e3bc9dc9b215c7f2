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

# fusedstep_rule_definitions(<out> <rule>): for a source that is compiled once for each rule. It sees no other rule's header,
# so that a change of that compiles nothing else anew.
function(fusedstep_rule_definitions OUT RULE)
  string(TOLOWER ${RULE} header)
  set(${OUT} FUSEDSTEP_RULE=${RULE} "FUSEDSTEP_RULE_HEADER=\"fusedstep/rules/${header}.h\"" PARENT_SCOPE)
endfunction()

# The instruction sets, the base first, and the options of each.
set(FUSEDSTEP_ISAS base)
set(fusedstep_options_of_base "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND FUSEDSTEP_ISAS avx2 avx512)
  set(fusedstep_options_of_avx2 -mavx2 -mfma -mf16c)
  set(fusedstep_options_of_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
endif()

# Those of matrix products: their base is for tests.
set(FUSEDSTEP_PRODUCT_ISAS base)
if("avx512" IN_LIST FUSEDSTEP_ISAS)
  list(APPEND FUSEDSTEP_PRODUCT_ISAS avx512bf16 amx)
  set(fusedstep_options_of_avx512bf16 ${fusedstep_options_of_avx512} -mavx512bf16)
  set(fusedstep_options_of_amx ${fusedstep_options_of_avx512bf16} -mamx-tile -mamx-bf16)
endif()

# Rules whose kernels are built for sanitizers: one of each family, and that of the most states. What others access is
# decided by the same templates. Theirs are the objects of a release build, which ccache has.
set(FUSEDSTEP_SANITIZED_RULES Adam Adan Lamb Lion SGD)

# Rules that linters see on each instruction set: one of each family. All others take turns, and have one set each.
set(FUSEDSTEP_LINTED_RULES Adam Lamb)

# Half of the time that kernels take to compile for sanitizers would go into asking for the alignment of each access, which
# the instructions do not need. Linked last, for the option has to come after those that ask for the checks.
add_library(fusedstep_unaligned INTERFACE)
target_compile_options(fusedstep_unaligned INTERFACE -fno-sanitize=alignment)

# fusedstep_kernels(NAME SOURCE ISA definitions...): a source of kernels for an instruction set, as an object library.
function(fusedstep_kernels NAME SOURCE ISA)
  add_library(${NAME} OBJECT ${SOURCE})
  target_compile_definitions(${NAME} PRIVATE FUSEDSTEP_ISA=${ISA} ${ARGN})
  # Kernels are optimised in every configuration: without inlining, vector code would leak through weak functions.
  # Contraction is off so that every instruction set rounds alike; what is to be fused says mul_add. The rounding mode
  # is the caller's: where it is not to nearest, -(a * b) is not (-a) * b.
  # GCC 12 warns of variables left undefined on purpose inside its own intrinsics, and notes at every register passed to a
  # function that older versions passed it otherwise: all of them inline.
  target_compile_options(${NAME} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi)
  # Under a sanitizer the compiler takes minutes for checks inline at every access, and for those of when each temporary that
  # stands for a register ends.
  set(level -O3)
  set(options fusedstep_options)
  string(REGEX MATCH "FUSEDSTEP_RULE=([A-Za-z0-9]+)" rule "${ARGN}")
  if(FUSEDSTEP_SANITIZE AND rule AND NOT "${CMAKE_MATCH_1}" IN_LIST FUSEDSTEP_SANITIZED_RULES)
    set(options fusedstep_plain_options)
  elseif(FUSEDSTEP_SANITIZE)
    list(APPEND options fusedstep_unaligned)
    set(level -fno-sanitize-address-use-after-scope
              $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>)
  endif()
  target_compile_options(${NAME} PRIVATE ${level} -ffp-contract=off -frounding-math -fno-math-errno -fno-trapping-math
                                         ${fusedstep_options_of_${ISA}})
  target_link_libraries(${NAME} PRIVATE ${options} torch::headers)
  set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(fusedstep_isa_objects OUT)
  set(kernels "${PROJECT_SOURCE_DIR}/cpu_kernels")
  fusedstep_rules(rules)
  list(LENGTH FUSEDSTEP_ISAS isas)
  set(objects)
  foreach(isa ${FUSEDSTEP_ISAS})
    list(FIND FUSEDSTEP_ISAS ${isa} turn)
    # ATen's transpositions are those of its CPU_CAPABILITY.
    string(TOUPPER ${isa} capability)
    string(REPLACE BASE DEFAULT capability ${capability})
    set(target fusedstep_kernels_${isa})
    fusedstep_kernels(${target} "${kernels}/table.cpp" ${isa} CPU_CAPABILITY=${capability} CPU_CAPABILITY_${capability})
    fusedstep_kernels(${target}_passes "${kernels}/matrix_passes.cpp" ${isa})
    list(APPEND objects $<TARGET_OBJECTS:${target}> $<TARGET_OBJECTS:${target}_passes>)
    foreach(rule ${rules})
      fusedstep_rule_definitions(definitions ${rule})
      fusedstep_kernels(${target}_${rule} "${kernels}/rule.cpp" ${isa} ${definitions})
      list(APPEND objects $<TARGET_OBJECTS:${target}_${rule}>)
      math(EXPR others_turn "${turn} % ${isas}")
      if(others_turn AND NOT rule IN_LIST FUSEDSTEP_LINTED_RULES)
        set_target_properties(${target}_${rule} PROPERTIES EXPORT_COMPILE_COMMANDS OFF)
      endif()
      math(EXPR turn "${turn} + 1")
    endforeach()
  endforeach()
  foreach(isa ${FUSEDSTEP_PRODUCT_ISAS})
    fusedstep_kernels(fusedstep_products_${isa} "${kernels}/products.cpp" ${isa})
    list(APPEND objects $<TARGET_OBJECTS:fusedstep_products_${isa}>)
  endforeach()
  if("avx512" IN_LIST FUSEDSTEP_ISAS)
    set_source_files_properties(src/run/isa.cpp PROPERTIES COMPILE_DEFINITIONS "FUSEDSTEP_HAVE_AVX2;FUSEDSTEP_HAVE_AVX512")
  endif()
  message(STATUS "CPU kernels are compiled for each instruction set, which takes minutes")
  set(${OUT} ${objects} PARENT_SCOPE)
endfunction()
