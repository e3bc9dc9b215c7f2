#include "tests/cpp/failing_new.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

namespace fusedstep::test {
namespace {

// Calls until the one that fails, this one included; 0: none does.
std::atomic<long> left_of_new{0}, left_of_tensors{0};

bool fails(std::atomic<long>& left) {
  long known = left.load();
  while (known > 0) {
    if (left.compare_exchange_weak(known, known - 1)) return known == 1;
  }
  return false;
}

// Code whose calls are counted.
struct Module {
  uintptr_t begin, end;
  Allocations calls;
};
constexpr size_t kMostModules = 16;
Module modules[kMostModules];
size_t module_count = 0;

int add_module(dl_phdr_info* info, size_t /*size*/, void* /*context*/) {
  const std::string_view name = info->dlpi_name;
  const auto is = [&](std::string_view part) { return name.find(part) != name.npos; };
  // The program itself has no name; a Python that runs the tests has nothing of interest.
  const bool is_own = name.empty() || is("libfusedstep.so") || is("_bind.abi3.so");
  const bool is_counted = is_own || is("libc10.so");
  for (int i = 0; is_counted && i < info->dlpi_phnum && module_count < kMostModules; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
    modules[module_count++] = {begin, begin + part.p_memsz,
                               is_own ? Allocations::kNew : Allocations::kTensors};
  }
  return 0;
}

bool is_counted(Allocations calls, const void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(caller);
  return std::any_of(modules, modules + module_count, [&](const Module& module) {
    return module.calls == calls && address >= module.begin && address < module.end;
  });
}

// The chains of calls that counted allocations have come from, while they are noted.
constexpr size_t kMostNoted = 4096;
unsigned long noted[kMostNoted];
std::atomic<size_t> noted_count{0};
std::atomic<bool> notes{false};

// A number for the calls that have led here, by the code under test alone: a Python between is left out.
unsigned long chain_of_calls() {
  void* calls[48];
  const int count = backtrace(calls, 48);
  unsigned long chain = 14695981039346656037UL;  // of FNV-1a
  for (int i = 0; i < count; ++i) {
    if (is_counted(Allocations::kNew, calls[i]))
      chain = (chain ^ reinterpret_cast<uintptr_t>(calls[i])) * 1099511628211UL;
  }
  return chain;
}

void note(const void* caller) {
  if (!is_counted(Allocations::kNew, caller)) return;
  const size_t at = noted_count++;
  if (at < kMostNoted) noted[at] = chain_of_calls();
}

void* allocate(size_t bytes, size_t alignment, const void* caller) {
  if (notes.load()) note(caller);
  if (left_of_new.load() > 0 && is_counted(Allocations::kNew, caller) && fails(left_of_new)) return nullptr;
  bytes = std::max<size_t>(bytes, 1);
  return alignment == 0 ? std::malloc(bytes)
                        : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

bool fails_tensor(const void* caller) {
  return left_of_tensors.load() > 0 && is_counted(Allocations::kTensors, caller) && fails(left_of_tensors);
}

// Tensors under a limit, by address; 0 is an empty place, 1 one that was taken.
class Held {
 public:
  void limit(long bytes) {
    const std::lock_guard lock(mutex_);
    std::fill_n(places_, kPlaces, 0);
    limit_ = bytes;
    now_ = most_ = 0;
    is_limited = true;
  }
  long end() {
    const std::lock_guard lock(mutex_);
    is_limited = false;
    return most_;
  }
  // Returns whether so many bytes more may be held.
  bool allows(long bytes) {
    const std::lock_guard lock(mutex_);
    return now_ + bytes <= limit_;
  }
  void add(void* memory) {
    const std::lock_guard lock(mutex_);
    for (size_t at = first_place(memory);; at = (at + 1) % kPlaces) {
      if (places_[at] > kTaken) continue;
      places_[at] = reinterpret_cast<uintptr_t>(memory);
      now_ += static_cast<long>(malloc_usable_size(memory));
      most_ = std::max(most_, now_);
      return;
    }
  }
  void remove(void* memory) {
    const std::lock_guard lock(mutex_);
    for (size_t at = first_place(memory); places_[at] != 0; at = (at + 1) % kPlaces) {
      if (places_[at] != reinterpret_cast<uintptr_t>(memory)) continue;
      places_[at] = kTaken;
      now_ -= static_cast<long>(malloc_usable_size(memory));
      return;
    }
  }

  std::atomic<bool> is_limited{false};

 private:
  static constexpr size_t kPlaces = 1 << 14;
  static constexpr uintptr_t kTaken = 1;
  static size_t first_place(void* memory) { return reinterpret_cast<uintptr_t>(memory) / 64 % kPlaces; }

  std::mutex mutex_;
  uintptr_t places_[kPlaces] = {};
  long limit_ = 0, now_ = 0, most_ = 0;
};
Held held;

void* allocate_or_throw(size_t bytes, size_t alignment, const void* caller) {
  void* const memory = allocate(bytes, alignment, caller);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void fail_allocation(Allocations of, long n) {
  module_count = 0;
  dl_iterate_phdr(add_module, nullptr);
  (of == Allocations::kNew ? left_of_new : left_of_tensors) = n;
}

void note_allocations() {
  fail_allocation(Allocations::kNew, 0);  // for the modules
  chain_of_calls();                       // whose first call loads a library
  noted_count = 0;
  notes = true;
}

long noted_allocations(unsigned long* chains, long most) {
  notes = false;
  const size_t count = std::min(noted_count.load(), std::min(kMostNoted, static_cast<size_t>(most)));
  std::copy_n(noted, count, chains);
  return static_cast<long>(count);
}

void limit_tensors(long bytes) {
  fail_allocation(Allocations::kTensors, 0);  // for the modules
  held.limit(bytes);
}

long most_held() { return held.end(); }

long allocations_left() { return std::max(left_of_new.exchange(0), left_of_tensors.exchange(0)); }

}  // namespace fusedstep::test

#define FUSEDSTEP_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

// The library's own operator delete, which calls free(), frees the memory that these return.
[[gnu::visibility("default")]] void* operator new(size_t bytes) {
  return fusedstep::test::allocate_or_throw(bytes, 0, FUSEDSTEP_CALLER);
}
[[gnu::visibility("default")]] void* operator new[](size_t bytes) {
  return fusedstep::test::allocate_or_throw(bytes, 0, FUSEDSTEP_CALLER);
}
[[gnu::visibility("default")]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return fusedstep::test::allocate_or_throw(bytes, static_cast<size_t>(alignment), FUSEDSTEP_CALLER);
}
[[gnu::visibility("default")]] void* operator new[](size_t bytes, std::align_val_t alignment) {
  return fusedstep::test::allocate_or_throw(bytes, static_cast<size_t>(alignment), FUSEDSTEP_CALLER);
}
[[gnu::visibility("default")]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return fusedstep::test::allocate(bytes, 0, FUSEDSTEP_CALLER);
}
[[gnu::visibility("default")]] void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return fusedstep::test::allocate(bytes, 0, FUSEDSTEP_CALLER);
}

extern "C" [[gnu::visibility("default")]] int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  using PosixMemalign = int (*)(void**, size_t, size_t);
  static const auto next = reinterpret_cast<PosixMemalign>(dlsym(RTLD_NEXT, "posix_memalign"));
  namespace test = fusedstep::test;
  const void* const caller = FUSEDSTEP_CALLER;
  if (test::fails_tensor(caller)) return ENOMEM;
  const bool is_limited = test::held.is_limited && test::is_counted(test::Allocations::kTensors, caller);
  if (is_limited && !test::held.allows(static_cast<long>(bytes))) return ENOMEM;
  const int error = next(memory, alignment, bytes);
  if (is_limited && error == 0) test::held.add(*memory);
  return error;
}

extern "C" void __libc_free(void* memory);  // glibc's own, NOLINT(bugprone-reserved-identifier)

extern "C" [[gnu::visibility("default")]] void free(void* memory) {
  if (fusedstep::test::held.is_limited && memory != nullptr) fusedstep::test::held.remove(memory);
  __libc_free(memory);
}
