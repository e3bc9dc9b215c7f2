"""Steps of four processes on the CPU."""

import re
import signal

import pytest

from support import four_processes, two_processes


def test_four_processes():
    failures = two_processes.failures_by_name(
        "gloo", four_processes.WORKS, processes=four_processes.PROCESSES
    )
    if failures:
        texts = [f"{name}\n{text}" for name, text in failures.items()]
        pytest.fail("\n".join(texts), pytrace=False)


@pytest.mark.parametrize(
    ("optimizer", "collective"), [("Lamb", "all_reduce"), ("Muon", "all_to_all_single")]
)
def test_where_one_of_four_dies_the_others_get_torchs_error(tmp_path, optimizer, collective):
    """Their weights are as before the step."""
    fork = two_processes.server_of_processes().Process
    ranks = range(four_processes.PROCESSES)
    arguments = [(tmp_path, rank, optimizer, collective) for rank in ranks]
    processes = [fork(target=four_processes.dies_in_a_step, args=args) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()  # if it waits for another one
    assert [each.exitcode for each in processes] == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        error = (tmp_path / f"error-{rank}").read_text()
        assert re.search("gloo.*Connection (closed|reset) by", error), error
