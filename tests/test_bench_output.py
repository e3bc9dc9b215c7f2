"""Where the commands of the benchmark leave their results."""

import argparse
import re

import pytest

import output
from benchmark import BENCH


def test_results_go_where_git_ignores_them_unless_they_are_to_be_committed(
    tmp_path, monkeypatch, repository
):
    parser = argparse.ArgumentParser()
    output.output_arguments(parser)
    monkeypatch.setattr(output, "ROOT", tmp_path)

    def folder(*arguments):
        found = output.results_folder(parser.parse_args(arguments), "machine", "peers")
        assert found.is_dir()
        return found.relative_to(tmp_path).as_posix()

    assert folder() == "build/results/machine/peers"
    assert folder("--commit") == "bench/results/machine/peers"
    assert folder("--output", str(tmp_path / "a b")) == "a b"
    with pytest.raises(SystemExit):
        folder("--commit", "--output", "x")
    assert "/build/" in (repository / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", ["clipping", "cuda", "embedding", "run", "run_adan", "run_peers"])
def test_every_command_leaves_the_choice_of_the_folder_to_one_place(name):
    text = (BENCH / f"{name}.py").read_text()
    assert len(re.findall(r"output\.(?:add|output)_arguments\(parser\)", text)) == 1
    assert text.count("output.results_folder(arguments, ") == 1
