#include "fusedstep/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "src/run/dispatch.h"

namespace fusedstep {
namespace {

struct Candidate {
  const cpu::KernelTable* table;
  bool (*runs_here)();
};

// Best first. A new instruction set is one more line here and one in cmake/FusedstepIsa.cmake.
const Candidate kCandidates[] = {
#if defined(FUSEDSTEP_HAVE_AVX512)
    {&cpu::avx512::kTable,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("fma");
     }},
#endif
#if defined(FUSEDSTEP_HAVE_AVX2)
    {&cpu::avx2::kTable,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {&cpu::base::kTable, [] { return true; }},
};

const cpu::KernelTable& named(const std::string& name, const char* who) {
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    if (!candidate.runs_here()) continue;
    if (name == candidate.table->isa) return *candidate.table;
    known += std::string(known.empty() ? "" : ", ") + candidate.table->isa;
  }
  throw std::invalid_argument(std::string(who) + ": '" + name +
                              "' is not an instruction set of this machine (" + known + ")");
}

const cpu::KernelTable& at_start() {
  const char* forced = std::getenv("FUSEDSTEP_ISA");
  if (forced != nullptr && *forced != '\0') return named(forced, "FUSEDSTEP_ISA");
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) return *candidate.table;
  }
  return cpu::base::kTable;
}

std::atomic<const cpu::KernelTable*> active{nullptr};

}  // namespace

const cpu::KernelTable& kernels() {
  const cpu::KernelTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = &at_start();
    active.store(table, std::memory_order_release);
  }
  return *table;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) names.emplace_back(candidate.table->isa);
  }
  return names;
}

std::string isa() { return kernels().isa; }

void force_isa(const std::string& name) {
  active.store(name.empty() ? &at_start() : &named(name, "force_isa"), std::memory_order_release);
}

}  // namespace fusedstep

int fusedstep_abi_version() { return FUSEDSTEP_ABI_VERSION; }
