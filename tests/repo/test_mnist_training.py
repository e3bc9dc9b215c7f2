"""The network of examples/mnist learns with LAMB, and fused and unfused steps agree on the way."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedstep import optim
from support import recipes

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "mnist"))
import data
import idx
import mnist

BATCH = 32
STEPS = 100


@pytest.fixture(scope="module")
def images_and_labels(tmp_path_factory):
    """MNIST where FUSEDSTEP_DATA tells of it, else scikit-learn's digits."""
    if "FUSEDSTEP_DATA" in os.environ:
        folder = data.find()
    else:
        pytest.importorskip("sklearn")
        folder = tmp_path_factory.mktemp("digits")
        data.export_digits(folder)
    images, labels = idx.read_set(folder, "train")
    return mnist.to_tensors(images[: BATCH * STEPS], labels[: BATCH * STEPS])


def losses(images_and_labels, fused, steps, dtype=torch.float32):
    torch.manual_seed(1)
    images, labels = images_and_labels
    model = mnist.Net().to(dtype)
    optimizer = optim.Lamb(model.parameters(), lr=0.01, fused=fused)
    data = images.to(dtype), labels
    epochs = (mnist.train(model, optimizer, *data, BATCH) for _ in itertools.count())
    batches = itertools.islice(itertools.chain.from_iterable(epochs), steps)
    return torch.stack(list(batches))


def test_the_loss_falls(images_and_labels):
    fused = losses(images_and_labels, fused=True, steps=STEPS)
    assert fused[:5].mean() > 2  # ln 10 = 2.3 is a guess among ten
    assert fused[-20:].mean() < 0.6


def test_fused_and_unfused_agree(images_and_labels):
    """In double: training doubles a difference every few steps, and in float32 torch's norms of the
    largest weight and its update are off by up to 5e-5 of their values."""
    fused, unfused = (
        losses(images_and_labels, fused=fused, steps=8, dtype=torch.float64)
        for fused in (True, False)
    )
    torch.testing.assert_close(fused, unfused, rtol=0, atol=1e-9)


LINE = re.compile(r"Test set: Average loss: \d\.\d{4}, Accuracy: (\d+)/(\d+) \((\d+)%\)\n")
COUNT = 100  # images of the small set, of as many shades of grey as classes


@pytest.fixture
def small_set(tmp_path):
    for name in ("train", "t10k"):
        labels = torch.arange(COUNT).remainder(10).to(torch.uint8)
        images = (labels * 25).view(COUNT, 1, 1).expand(COUNT, idx.SIDE, idx.SIDE)
        idx.write(tmp_path / f"{name}-images-idx3-ubyte", images.numpy())
        idx.write(tmp_path / f"{name}-labels-idx1-ubyte", labels.numpy())
    return tmp_path


def options(folder, json_name):
    text = "--epochs 2 --batch-size 32 --test-batch-size 64 --log-interval 3 --gamma .5 --threads 1"
    return [*text.split(), "--data", str(folder), "--json", str(folder / json_name)]


def test_the_program(small_set, capsys):
    """Standard output is one line an epoch, of a fixed form; the figures go to a file."""
    mnist.main(options(small_set, "figures.json"))

    matches = list(LINE.finditer(out := capsys.readouterr().out))
    assert out == "".join(match.group() for match in matches)
    report = json.loads((small_set / "figures.json").read_text())
    assert len(matches) == len(report["epochs"]) == 2
    for match, epoch in zip(matches, report["epochs"], strict=True):
        correct, total, percent = map(int, match.groups())
        assert total == COUNT
        assert epoch["accuracy"] == correct / COUNT
        assert percent == round(100 * correct / COUNT)
        assert f"loss: {epoch['loss']:.4f}" in match.group()
        assert len(epoch["training_losses"]) == 2  # steps 0 and 3 of four
    assert report["gamma"] == 0.5
    assert report["fused"] is True


def test_the_cpp_program_gives_the_same_figures(small_set, repository, capsys):
    """Both languages draw the same random numbers, call the same operators and write alike."""
    program = repository / "build" / "release" / "examples" / "mnist" / "mnist"
    if not program.exists():
        pytest.skip("the C++ program is not built")
    command = [program, *options(small_set, "cpp.json")]
    cpp = subprocess.run(command, capture_output=True, text=True, check=True)
    mnist.main(options(small_set, "python.json"))

    assert cpp.stdout == capsys.readouterr().out
    assert re.fullmatch(recipes.CLOSING_LINE, cpp.stderr.splitlines()[-1])
    reports = [json.loads((small_set / name).read_text()) for name in ("cpp.json", "python.json")]
    epochs = [report.pop("epochs") for report in reports]
    for cpp_epoch, python_epoch in zip(*epochs, strict=True):
        assert cpp_epoch.keys() == python_epoch.keys()
        for key in ("epoch", "loss", "accuracy", "training_losses"):
            assert cpp_epoch[key] == pytest.approx(python_epoch[key], rel=1e-6)
    assert reports[0].pop("language") == "C++"
    assert reports[1].pop("language") == "Python"
    assert reports[1].pop("torch") == torch.__version__
    # The torch that the program was built on: this one or another.
    assert re.fullmatch(r"\d+\.\d+\.\d+", reports[0].pop("torch"))
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    "option", ["--epochs=0", "--lr=fast", "--epoch-count=1", "--threads=-1", "--threads=9999"]
)
def test_the_program_refuses_bad_options(option):
    with pytest.raises(SystemExit, match="2"):
        mnist.main([option])


def test_the_program_names_a_damaged_file(tmp_path):
    for name in data.RESOURCES:
        (tmp_path / name).write_bytes(b"no gzip")
    with pytest.raises(SystemExit, match=r"^mnist: .*train-images-idx3-ubyte.gz: corrupt gzip"):
        mnist.main(["--data", str(tmp_path)])
