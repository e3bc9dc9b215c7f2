"""Law: passes of a step go together, and exchange the same in every process."""

import pytest
import torch

from fusedstep._step.program import Sums, run

WEIGHTS = [torch.ones(2) for _ in range(3)]


def numbers(*values):
    return torch.tensor([values], dtype=torch.float64)


class Noted:
    """Notes what passes do, and doubles what they add up: another process has the same."""

    def __init__(self):
        self.done = []

    def doubled(self, parts):
        self.done.append(("sums", len(parts)))
        return [2 * part for _, part in parts]

    def adds_up(self, name, *rounds):
        for each in rounds:
            (total,) = yield Sums([([WEIGHTS[0]], numbers(each))])
            self.done.append((name, total.item()))

    def transfers(self, name):
        for stage in ("there", "back"):
            self.done.append((name, stage))
            yield self.Transfer(self, name, stage)
        self.done.append((name, "moved"))

    class Transfer:
        def __init__(self, noted, *what):
            self.noted, self.what = noted, what

        def wait(self):
            self.noted.done.append(("waits", *self.what))


def test_sums_of_all_passes_go_together():
    noted = Noted()
    passes = [noted.adds_up("a", 1, 3), noted.adds_up("b", 2, 5)]
    run(passes, [noted.doubled, noted.doubled])
    assert noted.done == [
        ("sums", 2),
        ("a", 2.0),
        ("b", 4.0),
        ("sums", 2),
        ("a", 6.0),
        ("b", 10.0),
    ]


@pytest.mark.parametrize("passes", [0, 1], ids=["no pass", "a pass with less"])
def test_a_process_with_nothing_takes_part_in_all_sums(passes):
    noted = Noted()
    run([noted.adds_up("a", 1)][:passes], [noted.doubled] * 3)
    assert [what for what in noted.done if what[0] == "sums"] == [
        ("sums", passes),
        ("sums", 0),
        ("sums", 0),
    ]


def test_transfers_are_under_way_beside_the_next_pass():
    noted = Noted()
    run(map(noted.transfers, "abc"))
    assert noted.done == [
        ("a", "there"),
        ("b", "there"),
        ("waits", "a", "there"),
        ("a", "back"),
        ("c", "there"),
        ("waits", "b", "there"),
        ("b", "back"),
        ("waits", "a", "back"),
        ("a", "moved"),
        ("waits", "c", "there"),
        ("c", "back"),
        ("waits", "b", "back"),
        ("b", "moved"),
        ("waits", "c", "back"),
        ("c", "moved"),
    ]


def test_an_error_of_a_pass_stops_all():
    noted = Noted()

    def fails():
        yield Sums([])
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run([fails(), noted.adds_up("a", 1)], [noted.doubled])
    assert noted.done == [("sums", 1)]
