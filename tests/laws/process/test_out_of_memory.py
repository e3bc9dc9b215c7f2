"""Law: a step whose memory runs out says so and has changed nothing; taken again, it is right."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support import failing_memory
from support.failing_memory import LIMIT, NEW, TENSORS, Scenario


def faults_of(scenario: Scenario, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields what is wrong with the results of one optimizer and scenario, by kind."""
    kinds = scenario.kinds
    assert {*kinds} <= {NEW, TENSORS, LIMIT}
    for of_kind in found.values():
        yield from of_kind["faults"]
    if not any(found[str(kind)]["tried"] > 0 for kind in kinds):
        yield "nothing was made to fail"
    stopped_half_way = sum(of_kind["partial"] for of_kind in found.values())
    # An error names what has been stepped where others take the memory that a step gives back.
    if scenario.is_alone != (stopped_half_way == 0):
        yield f"{stopped_half_way} errors name weights that have been stepped"


# One test for each process: two workers that share the tests of one process would both start it.
@pytest.mark.parametrize("part", range(failing_memory.PARTS))
def test_all_has_happened_or_nothing(part, tmp_path, repository, subprocess_environment):
    library = repository / "build" / "release" / "tests" / "cpp" / "libfusedstep_preloaded.so"
    assert library.is_file(), "cmake --build --preset release --target fusedstep_preloaded"
    file = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, failing_memory.__file__, library, str(part), file],
        env=subprocess_environment | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=900,  # beside other processes
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    subjects = {
        f"{case.name}: {name}": scenario
        for case, name, scenario in failing_memory.part_of_subjects(part)
    }
    assert found.keys() == subjects.keys()
    faults = {name: [*faults_of(subjects[name], found[name])] for name in subjects}
    assert {name: each for name, each in faults.items() if each} == {}
