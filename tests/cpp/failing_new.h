// Memory that runs out on demand: operator new, posix_memalign and free of the whole process, as they are
// and, when asked, failing once or while too much is held. To be linked into a program, or preloaded into
// one.
#pragma once

namespace fusedstep::test {

// Allocations that are counted: calls of operator new from the code under test (that is, from this project's
// libraries, the module of Python and the program itself), or calls of posix_memalign from libc10, by which
// torch makes tensors. Libraries of matrix products call it too: without memory they crash.
enum class Allocations : int { kNew, kTensors };

extern "C" {
// Has the n-th allocation from now on fail, on whichever thread it is.
[[gnu::visibility("default")]] void fail_allocation(Allocations of, long n);
// Has none fail any more. Returns how many are still to come before the one that was to fail: 0 if it has.
[[gnu::visibility("default")]] long allocations_left();

// From now on, notes the chains of calls that allocations of the code under test come from.
[[gnu::visibility("default")]] void note_allocations();
// Notes no more. Returns how many were noted, and writes a number for the chain of each, in their order.
[[gnu::visibility("default")]] long noted_allocations(unsigned long* chains, long most);

// From now on, has every allocation of tensors fail that would make those held at once more than so many
// bytes. Those from before count for nothing.
[[gnu::visibility("default")]] void limit_tensors(long bytes);
// Has none fail any more. Returns the most bytes of tensors that have been held at once.
[[gnu::visibility("default")]] long most_held();
}

}  // namespace fusedstep::test
