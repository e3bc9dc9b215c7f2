"""Law: all tensors of a step share one OpenMP session, and teams are no larger than they may be.

A small library is preloaded that counts the sessions which anything in the process starts, and the
threads that each asks for.
"""

import json
import subprocess
import sys

import pytest

from support.cases import PLAIN

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

static int sessions, largest_team;

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  __atomic_add_fetch(&sessions, 1, __ATOMIC_RELAXED);
  if ((int)threads > largest_team) largest_team = (int)threads;
  ((Parallel)dlsym(RTLD_NEXT, "GOMP_parallel"))(body, data, threads, flags);
}

void counter_reset(void) { sessions = largest_team = 0; }
int counter_sessions(void) { return sessions; }
int counter_largest_team(void) { return largest_team; }
"""

PROGRAM = """
import ctypes, json, os, sys
import torch
from support.cases import PLAIN
from support.stepping import TEAM

counter = ctypes.CDLL(sys.argv[1])

def count(step):
    counter.counter_reset()
    step()
    return counter.counter_sessions(), counter.counter_largest_team()

def ready(case, shapes, **options):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = case.build(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.step

found = {}
for case in PLAIN:
    torch.set_num_threads(2)
    rows = found[case.name] = {}
    rows["2000 small"] = count(ready(case, [(100,)] * 2000))
    rows["one large"] = count(ready(case, [(1024, 1024)]))
    rows["large and small"] = count(ready(case, [(1024, 1024), *[(100,)] * 50]))
    rows["bias"] = count(ready(case, [(64,)]))
    rows["one element too few"] = count(ready(case, [(TEAM - 1,)]))
    rows["just enough"] = count(ready(case, [(TEAM,)]))
    torch.set_num_threads(3)
    rows["one large, 3 threads"] = count(ready(case, [(1024, 1024)]))
    torch.set_num_threads(1)
    rows["one large, 1 thread"] = count(ready(case, [(1024, 1024)]))
torch.set_num_threads(2)
found["control"] = count(lambda: [torch.ones(100_000).add_(1) for _ in range(20)])

step = ready(PLAIN[0], [(1024, 1024)])
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps(count(step)).encode())
    os._exit(0)
os.wait()
found["child of fork"] = json.loads(os.read(read, 1000))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory, subprocess_environment):
    """(sessions, largest team) of one step, by optimizer and situation."""
    folder = tmp_path_factory.mktemp("sessions")
    source, library = folder / "counter.c", folder / "libcounter.so"
    source.write_text(COUNTER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60
    )
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, library],
        env=subprocess_environment | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


NAMES = [case.name for case in PLAIN]


def test_the_counter_counts(sessions):
    """The control: one session of two threads for each of torch's operations on large tensors."""
    count, team = sessions["control"]
    assert count >= 20
    assert team in (0, 2)  # torch leaves the number to OpenMP


@pytest.mark.parametrize("situation", ["2000 small", "one large", "large and small"])
@pytest.mark.parametrize("name", NAMES)
def test_one_session_for_all_tensors(sessions, name, situation):
    """For a two-phase rule too: its team waits between the phases, and goes on."""
    assert sessions[name][situation][0] == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_team_follows_torch(sessions, name):
    assert sessions[name]["one large"][1] == 2
    assert sessions[name]["just enough"][1] == 2
    assert sessions[name]["one large, 3 threads"][1] == 3


@pytest.mark.parametrize("situation", ["bias", "one element too few", "one large, 1 thread"])
@pytest.mark.parametrize("name", NAMES)
def test_no_team_where_none_pays(sessions, name, situation):
    count, team = sessions[name][situation]
    assert count == 0 or team == 1


def test_a_child_of_fork_never_enters_openmp(sessions):
    assert sessions["child of fork"] == [0, 0]
