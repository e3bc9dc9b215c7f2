# Imported targets for a torch: torch::headers, torch::cpu (what the operators need) and torch::torch (all of LibTorch). It is
# that of Torch_DIR (a LibTorch without Python, or one that find_package(Torch) has found), of the interpreter
# Python_EXECUTABLE, of the first folder in CMAKE_PREFIX_PATH that has one, or of a Python that is found. torch's own CMake
# package wants a CUDA toolkit wherever torch was built with CUDA; these targets do not. torch is located, not imported.

if(TARGET torch::torch)
  return()
endif()

if(NOT (TORCH_INSTALL_PREFIX OR Torch_DIR OR Python_EXECUTABLE))
  find_file(fusedstep_torch_config TorchConfig.cmake PATHS ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH
            PATH_SUFFIXES Torch share/cmake/Torch NO_DEFAULT_PATH NO_CACHE)
  if(fusedstep_torch_config)
    cmake_path(GET fusedstep_torch_config PARENT_PATH Torch_DIR)
  endif()
endif()

if(TORCH_INSTALL_PREFIX)
  set(fusedstep_torch_root "${TORCH_INSTALL_PREFIX}")
elseif(Torch_DIR)
  get_filename_component(fusedstep_torch_root "${Torch_DIR}/../../.." ABSOLUTE)
else()
  find_package(Python 3.10 COMPONENTS Interpreter)
  set(fusedstep_torch_root)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE fusedstep_torch_root
      OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
endif()
if(NOT EXISTS "${fusedstep_torch_root}/lib/libtorch_cpu.so")
  message(
    FATAL_ERROR
      "torch was not found in '${fusedstep_torch_root}': set Python_EXECUTABLE to a Python with torch >= 2.11, or Torch_DIR "
      "to the folder share/cmake/Torch of a LibTorch, or have torch.utils.cmake_prefix_path in CMAKE_PREFIX_PATH")
endif()
file(STRINGS "${fusedstep_torch_root}/include/torch/headeronly/version.h" fusedstep_torch_version
     REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
list(TRANSFORM fusedstep_torch_version REPLACE "[^0-9]" "")
list(JOIN fusedstep_torch_version "." fusedstep_torch_version)
if(fusedstep_torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${fusedstep_torch_version} is too old: fusedstep needs 2.11 or later")
endif()
message(STATUS "torch ${fusedstep_torch_version} in ${fusedstep_torch_root}")

add_library(torch::headers INTERFACE IMPORTED)
target_include_directories(
  torch::headers SYSTEM INTERFACE "${fusedstep_torch_root}/include" "${fusedstep_torch_root}/include/torch/csrc/api/include")

foreach(library c10 torch_cpu torch)
  add_library(torch::lib_${library} SHARED IMPORTED)
  set_target_properties(torch::lib_${library} PROPERTIES IMPORTED_LOCATION "${fusedstep_torch_root}/lib/lib${library}.so")
endforeach()

if(EXISTS "${fusedstep_torch_root}/lib/libtorch_cuda.so")
  add_library(torch::lib_torch_cuda SHARED IMPORTED)
  set_target_properties(torch::lib_torch_cuda PROPERTIES IMPORTED_LOCATION "${fusedstep_torch_root}/lib/libtorch_cuda.so")
endif()

add_library(torch::cpu INTERFACE IMPORTED)
target_link_libraries(torch::cpu INTERFACE torch::headers torch::lib_torch_cpu torch::lib_c10)

# libtorch.so pulls in the CUDA libraries where there are any; a program that only names CPU symbols would drop it.
add_library(torch::torch INTERFACE IMPORTED)
target_link_libraries(torch::torch INTERFACE torch::cpu)
target_link_options(torch::torch INTERFACE "LINKER:-rpath-link,${fusedstep_torch_root}/lib")
