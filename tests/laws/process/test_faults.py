"""Processes that die: while they write a checkpoint, and in the middle of a step."""

import os
import re
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import recipes
from support.stepping import assert_same_bits
from support.two_processes import mesh_of, server_of_processes

OPTIONS = ("--steps", "4", "--every", "1", "--batch", "2")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_it_writes(folder: Path) -> None:
    """Writes two checkpoints, and of a third one all files but the last, which is cut off."""
    from torch.distributed.checkpoint import FileSystemWriter

    finish = FileSystemWriter.finish

    def cut(writer, metadata, results):
        if "3" in Path(writer.path).name:
            *_, last = sorted(Path(writer.path).glob("*.distcp"))
            os.truncate(last, last.stat().st_size // 2)
            die()
        finish(writer, metadata, results)

    FileSystemWriter.finish = cut
    recipes.run("resume", *OPTIONS, "--folder", str(folder))


def dies_in_a_step(folder: Path, rank: int) -> None:
    """Saves shards after a step. In the next one a process dies, and the other tells its error.

    It goes on alone with something else, and dies of that.
    """
    from torch.distributed.fsdp import fully_shard

    from fusedstep import optim
    from fusedstep._step import sums

    os.environ["FUSEDSTEP_DATA"] = "nowhere"  # it makes its text, as recipes.run() has it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    sys.path.insert(0, str(recipes.FOLDER))
    import recipe
    import resume

    model = fully_shard(recipe.LanguageModel(), mesh=mesh_of("cpu"))
    optimizer = optim.Lamb(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(recipe.batches(2, 2, "cpu"), 1):
        if step == 2 and rank == 1:
            sums.total = lambda *_: die()
        model.loss(tokens).backward()
        try:
            optimizer.step()
        except RuntimeError:
            (folder / "error").write_text(traceback.format_exc())
            dist.destroy_process_group()
            dies_while_it_writes(folder / "alone")
        resume.save(folder, step, model, optimizer)
        whole = [weight.detach().full_tensor() for weight in model.parameters()]
        if rank == 0:
            torch.save(whole, folder / "whole.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of two processes that have died."""
    found = tmp_path_factory.mktemp("deaths")
    fork = server_of_processes().Process
    processes = [fork(target=dies_in_a_step, args=(found, rank)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()  # if it waits for the other
    assert [process.exitcode for process in processes] == 2 * [-signal.SIGKILL]
    return found


def test_a_checkpoint_that_was_being_written_replaces_none(folder, tmp_path):
    folder = folder / "alone"
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-00000001", "step-00000002", "partial-00000003"}
    found = recipes.run("resume", *OPTIONS, "--folder", str(folder))
    straight = recipes.run("resume", *OPTIONS, "--folder", str(tmp_path))
    # torch adds up gradients in another order with another number of threads.
    losses = [list(map(float, run.losses)) for run in (found, straight)]
    assert losses[0] == pytest.approx(losses[1][2:], rel=1e-6)
    assert {path.name for path in folder.iterdir()} == {"step-00000003", "step-00000004"}


def test_the_others_get_torchs_error_and_checkpoints_stay_readable(folder, monkeypatch):
    error = (folder / "error").read_text()
    assert "in _take_native" in error
    assert re.search("gloo.*Connection (closed|reset) by", error)
    monkeypatch.syspath_prepend(str(recipes.FOLDER))
    monkeypatch.setenv("FUSEDSTEP_DATA", "nowhere")
    import recipe
    import resume

    from fusedstep import optim

    model = recipe.LanguageModel()
    optimizer = optim.Lamb(model.parameters(), lr=1e-2)
    assert resume.load(folder, model, optimizer) == 1
    for weight, whole in zip(model.parameters(), torch.load(folder / "whole.pt"), strict=True):
        assert_same_bits(weight.detach(), whole, "weight")
    model.loss(next(recipe.batches(1, 2, "cpu"))).backward()
    optimizer.step()
