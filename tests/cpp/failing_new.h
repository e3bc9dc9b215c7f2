// Memory that runs out on demand: operator new and posix_memalign of the whole process, as they are and, when
// asked, failing once. To be linked into a program, or preloaded into one.
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
}

}  // namespace fusedstep::test
