#include "fusedstep/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#if defined(FUSEDSTEP_HAVE_AVX512)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "src/run/dispatch.h"

namespace fusedstep {
namespace {

// The kernels of a level. The levels of matrix products add these to another level's kernels.
struct Candidate {
  const char* name;
  const cpu::KernelTable* table;
  const cpu::PassTable* passes;
  const cpu::ProductKernels* products;
  bool (*runs_here)();
};

#if defined(FUSEDSTEP_HAVE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Returns whether the CPU has AMX, the system saves its registers, and this process may use them, which it
// has to ask for once.
bool has_amx() {
  static const bool has = [] {
    constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kOsSaves = 1u << 27;
    constexpr uint64_t kTileStates = 3u << 17;
    constexpr long kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512bf16() || __get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsSaves) == 0) return false;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBFloat16) == 0 || (d & kTile) == 0)
      return false;
    uint32_t low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
  }();
  return has;
}
#endif

// Best first. A new instruction set is one more line here and one in cmake/FusedstepIsa.cmake.
const Candidate kCandidates[] = {
#if defined(FUSEDSTEP_HAVE_AVX512)
    {"amx", &cpu::avx512::kTable, &cpu::avx512::kPasses, &cpu::amx::kProducts, has_amx},
    {"avx512bf16", &cpu::avx512::kTable, &cpu::avx512::kPasses, &cpu::avx512bf16::kProducts, has_avx512bf16},
    {"avx512", &cpu::avx512::kTable, &cpu::avx512::kPasses, nullptr, has_avx512},
#endif
#if defined(FUSEDSTEP_HAVE_AVX2)
    {"avx2", &cpu::avx2::kTable, &cpu::avx2::kPasses, nullptr,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"base", &cpu::base::kTable, &cpu::base::kPasses, nullptr, [] { return true; }},
};

const Candidate& named(const std::string& name, const char* who) {
  std::string known;
  for (const Candidate& candidate : kCandidates) {
    if (!candidate.runs_here()) continue;
    if (name == candidate.name) return candidate;
    known += std::string(known.empty() ? "" : ", ") + candidate.name;
  }
  throw std::invalid_argument(std::string(who) + ": '" + name +
                              "' is not an instruction set of this machine (" + known + ")");
}

const Candidate& at_start() {
  const char* forced = std::getenv("FUSEDSTEP_ISA");
  if (forced != nullptr && *forced != '\0') return named(forced, "FUSEDSTEP_ISA");
  return *std::ranges::find_if(kCandidates, [](const Candidate& candidate) { return candidate.runs_here(); });
}

std::atomic<const Candidate*> active{nullptr};

const Candidate& in_use() {
  const Candidate* candidate = active.load(std::memory_order_acquire);
  if (candidate == nullptr) {
    candidate = &at_start();
    active.store(candidate, std::memory_order_release);
  }
  return *candidate;
}

// The names of those that run here: of levels of products, or of the others.
std::vector<std::string> names(bool of_products) {
  std::vector<std::string> found;
  for (const Candidate& candidate : kCandidates) {
    if ((candidate.products != nullptr) == of_products && candidate.runs_here())
      found.emplace_back(candidate.name);
  }
  return found;
}

}  // namespace

const cpu::KernelTable& kernels() { return *in_use().table; }

const cpu::PassTable& pass_kernels() { return *in_use().passes; }

const cpu::ProductKernels* product_kernels() { return in_use().products; }

std::vector<std::string> isas() { return names(false); }

std::vector<std::string> product_isas() { return names(true); }

std::string isa() { return kernels().isa; }

std::string product_isa() {
  const cpu::ProductKernels* products = product_kernels();
  return products == nullptr ? "" : products->isa;
}

void force_isa(const std::string& name) {
  active.store(name.empty() ? &at_start() : &named(name, "force_isa"), std::memory_order_release);
}

}  // namespace fusedstep

int fusedstep_abi_version() { return FUSEDSTEP_ABI_VERSION; }
