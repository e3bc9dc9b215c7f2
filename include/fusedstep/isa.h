// Which instruction set the CPU kernels use, and the version of the library's interface.
#pragma once
#include <string>
#include <vector>

#if defined(FUSEDSTEP_BUILDING)
#define FUSEDSTEP_API __attribute__((visibility("default")))
#else
#define FUSEDSTEP_API
#endif

namespace fusedstep {

// Instruction sets that this machine runs and this build has, best first: "avx512", "avx2", "base".
FUSEDSTEP_API std::vector<std::string> isas();

// The one in use: the best, unless the environment variable FUSEDSTEP_ISA or force_isa() says otherwise.
// Throws std::invalid_argument if FUSEDSTEP_ISA names none of isas() or product_isas().
FUSEDSTEP_API std::string isa();

// Levels that have kernels for products of bfloat16 matrices, best first: "amx", "avx512bf16". The other
// kernels are those of "avx512" there.
FUSEDSTEP_API std::vector<std::string> product_isas();

// The one in use; "" if isa() was chosen by its name, and products are torch's.
FUSEDSTEP_API std::string product_isa();

// Uses the named one from now on in this process; "" goes back to the choice at start-up.
// Throws std::invalid_argument if neither isas() nor product_isas() lists it.
FUSEDSTEP_API void force_isa(const std::string& name);

}  // namespace fusedstep

// Raised when a header of this version no longer works with an older libfusedstep.so. The C++ optimizers call
// it, which also keeps the linker from dropping a library that is otherwise reached through torch's
// dispatcher only.
extern "C" FUSEDSTEP_API int fusedstep_abi_version();
#define FUSEDSTEP_ABI_VERSION 10
