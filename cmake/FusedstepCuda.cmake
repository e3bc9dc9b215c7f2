# fusedstep_cuda_library(<target>): the CUDA backend as a library of its own, where nvcc is. Each rule of the list is
# compiled by itself.

set(FUSEDSTEP_WITH_CUDA AUTO CACHE STRING "The CUDA backend: AUTO (where nvcc and a torch for CUDA are), ON or OFF")
set(FUSEDSTEP_CUDA_ARCHITECTURES AUTO CACHE STRING
    "GPU architectures to compile for: AUTO (of the GPUs that are here, else ALL), ALL, NONE, or as CMAKE_CUDA_ARCHITECTURES")

# Rules that step projected gradients in the epilogue of the product.
set(FUSEDSTEP_PROJECTED_RULES Adam)

function(fusedstep_has_cuda OUT)
  set(${OUT} OFF PARENT_SCOPE)
  if(FUSEDSTEP_WITH_CUDA STREQUAL "OFF" OR FUSEDSTEP_SANITIZE)
    return()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND TARGET torch::lib_torch_cuda)
    set(${OUT} ON PARENT_SCOPE)
  elseif(FUSEDSTEP_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FUSEDSTEP_WITH_CUDA is ON, but there is no nvcc, or torch is built without CUDA")
  else()
    message(STATUS "nvcc or a torch for CUDA was not found: fusedstep is built for the CPU only")
  endif()
endfunction()

# fusedstep_cuda_architectures(<out>): those of the GPUs that are here, for all take nvcc minutes. Without a GPU a build in
# place is NONE: nothing here can run the kernels, so they go as far as PTX and are hardly optimised.
function(fusedstep_cuda_architectures OUT)
  set(architectures ${FUSEDSTEP_CUDA_ARCHITECTURES})
  if(architectures STREQUAL "AUTO")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE found ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${found}")
    string(REPLACE "." "" architectures "${architectures}")
    list(REMOVE_DUPLICATES architectures)
    if(NOT architectures AND FUSEDSTEP_IN_PLACE)
      set(architectures NONE)
    endif()
  endif()
  if(architectures STREQUAL "NONE")
    set(architectures 90-virtual)
    set(FUSEDSTEP_CUDA_RUNS_NOWHERE ON PARENT_SCOPE)
    message(STATUS "CUDA kernels are compiled as a check, slow ones: set FUSEDSTEP_CUDA_ARCHITECTURES for another machine's GPU")
  endif()
  if(NOT architectures OR architectures STREQUAL "ALL")
    set(architectures 80-real 86-real 89-real 90-real 100-real 120)  # the last also as PTX, which newer ones compile
  endif()
  message(STATUS "CUDA kernels are compiled for ${architectures}, which takes minutes")
  set(${OUT} ${architectures} PARENT_SCOPE)
endfunction()

# IEEE arithmetic as on the CPU: nothing is contracted, approximated or flushed to zero.
set(fusedstep_nvcc_options -O3 -std=c++20 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false
                           --expt-relaxed-constexpr -Xcompiler=-fvisibility=hidden)

function(fusedstep_cuda_objects NAME SOURCE)
  add_library(${NAME} OBJECT ${SOURCE})
  target_compile_options(${NAME} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${fusedstep_nvcc_options}>)
  if(FUSEDSTEP_CUDA_RUNS_NOWHERE AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    target_compile_options(${NAME} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)  # a third of the time
  endif()
  # nvcc takes one GPU after another, and a rule's source is most of what the last compilers wait for.
  list(LENGTH CMAKE_CUDA_ARCHITECTURES gpus)
  if(gpus GREATER 1)
    target_compile_options(${NAME} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=${gpus}>)
  endif()
  target_compile_definitions(${NAME} PRIVATE ${ARGN})
  target_include_directories(${NAME} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include")
  set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(fusedstep_cuda_library TARGET)
  set(kernels "${PROJECT_SOURCE_DIR}/cuda_kernels")
  fusedstep_cuda_objects(fusedstep_cuda_gradients "${kernels}/gradients.cu")
  fusedstep_cuda_objects(fusedstep_cuda_factored "${kernels}/factored.cu")
  fusedstep_cuda_objects(fusedstep_cuda_matrix_passes "${kernels}/matrix_passes.cu")
  fusedstep_cuda_objects(fusedstep_cuda_chosen_channels "${kernels}/chosen_channels.cu")
  set(objects $<TARGET_OBJECTS:fusedstep_cuda_gradients> $<TARGET_OBJECTS:fusedstep_cuda_factored>
              $<TARGET_OBJECTS:fusedstep_cuda_matrix_passes> $<TARGET_OBJECTS:fusedstep_cuda_chosen_channels>)
  foreach(rule ${FUSEDSTEP_RULES})
    fusedstep_rule_definitions(definitions ${rule})
    fusedstep_cuda_objects(fusedstep_cuda_${rule} "${kernels}/instantiate.cu" ${definitions})
    list(APPEND objects $<TARGET_OBJECTS:fusedstep_cuda_${rule}>)
  endforeach()
  # The kernels use instructions of one GPU, and are small: compiled in full for that, whatever others are for.
  set(FUSEDSTEP_CUDA_RUNS_NOWHERE OFF)
  foreach(rule ${FUSEDSTEP_PROJECTED_RULES})
    fusedstep_rule_definitions(definitions ${rule})
    fusedstep_cuda_objects(fusedstep_cuda_projected_${rule} "${kernels}/projected.cu" ${definitions})
    set_target_properties(fusedstep_cuda_projected_${rule} PROPERTIES CUDA_ARCHITECTURES 90a-real)
    list(APPEND objects $<TARGET_OBJECTS:fusedstep_cuda_projected_${rule}>)
  endforeach()
  foreach(part low_rank_products matrix_products matrix_scalings)
    fusedstep_cuda_objects(fusedstep_cuda_${part} "${kernels}/${part}.cu")
    set_target_properties(fusedstep_cuda_${part} PROPERTIES CUDA_ARCHITECTURES 90a-real)
    list(APPEND objects $<TARGET_OBJECTS:fusedstep_cuda_${part}>)
  endforeach()

  # A CUDA runtime of its own, of which nothing is seen outside: torch's may be of another version. The driver keeps what
  # the two have in common, as the current device and streams.
  add_library(
    ${TARGET} SHARED
    ${objects} src/cuda/code_table.cpp src/cuda/cuda_factored.cpp src/cuda/cuda_low_rank_products.cpp
    src/cuda/cuda_matrix_chains.cpp src/cuda/cuda_matrix_passes.cpp src/cuda/cuda_plan.cpp src/cuda/cuda_projected.cpp
    src/cuda/device_tables.cpp src/cuda/memory.cpp src/cuda/versions.cpp)
  list(TRANSFORM FUSEDSTEP_PROJECTED_RULES REPLACE "(.+)" "FUSEDSTEP_CASE(\\1)" OUTPUT_VARIABLE cases)
  list(JOIN cases " " cases)
  set_source_files_properties(src/cuda/cuda_projected.cpp PROPERTIES COMPILE_DEFINITIONS "FUSEDSTEP_PROJECTED_CASES=${cases}")
  target_compile_definitions(${TARGET} PRIVATE USE_CUDA)  # for torch's stable interface to show that to CUDA
  target_link_libraries(${TARGET} PRIVATE fusedstep fusedstep_options torch::headers torch::lib_torch_cuda CUDA::cudart_static)
  target_link_options(${TARGET} PRIVATE LINKER:-z,defs LINKER:--exclude-libs,ALL)
  # libfusedstep.so is beside it, or in the package that this one's goes with.
  set_target_properties(${TARGET} PROPERTIES CUDA_RUNTIME_LIBRARY Static INSTALL_RPATH "$ORIGIN:$ORIGIN/../../fusedstep/lib")
endfunction()
