"""Law: a step whose memory runs out says so and has changed nothing; taken again, it is right."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import failing_memory
from support.failing_memory import LIMIT, NEW, TENSORS

SUBJECTS = {
    f"{case.name}: {name}": (part, scenario)
    for part in range(failing_memory.PARTS)
    for case, name, scenario in failing_memory.part_of_subjects(part)
}


@pytest.fixture(scope="module")
def results_of(tmp_path_factory, repository, subprocess_environment):
    """Asks failing_memory.py about a part of the subjects, by optimizer and scenario."""
    library = repository / "build" / "release" / "tests" / "cpp" / "libfusedstep_preloaded.so"
    assert library.is_file(), "cmake --build --preset release --target fusedstep_preloaded"

    @functools.cache
    def results_of(part):
        file = tmp_path_factory.mktemp("memory") / "results"
        done = subprocess.run(
            [sys.executable, failing_memory.__file__, library, str(part), file],
            env=subprocess_environment | {"LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=900,  # beside other processes
        )
        assert done.returncode == 0, done.stderr
        return json.loads(Path(file).read_text())

    return results_of


@pytest.mark.parametrize("subject", SUBJECTS)
def test_all_has_happened_or_nothing(results_of, subject):
    part, scenario = SUBJECTS[subject]
    found = results_of(part)[subject]
    assert [fault for of_kind in found.values() for fault in of_kind["faults"]] == []
    kinds = scenario.kinds
    assert any(found[str(kind)]["tried"] > 0 for kind in kinds), "nothing was made to fail"
    assert set(kinds) <= {NEW, TENSORS, LIMIT}
    stopped_half_way = sum(of_kind["partial"] for of_kind in found.values())
    # An error names what has been stepped where others take the memory that a step gives back.
    assert stopped_half_way == 0 if scenario.is_alone else stopped_half_way > 0
