"""Ultralytics: the trainer of the page on MuSGD, which converts what its base has made."""

import importlib
import logging
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fusedstep import optim
from support.pages import ROOT, blocks
from support.small import assert_native, need

FOLDER = ROOT / "build" / "ultralytics"
"""Folder in which `./run.sh test` puts Ultralytics."""

sys.path.append(str(FOLDER))
need("ultralytics")

CHANNELS = 256
"""The most of a layer, of which the smallest model has a quarter; published are 1024."""

PAGE = ROOT / "docs" / "optimizers" / "musgd.md"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """The class of the page, and its base."""
    os.environ["YOLO_CONFIG_DIR"] = str(tmp_path_factory.mktemp("settings"))
    os.environ["YOLO_OFFLINE"] = "true"
    (code,) = (block for block in blocks(PAGE, "py") if "class Trainer" in block)
    names = {"__name__": "page"}
    exec(compile(code.partition("\n\n\nYOLO(")[0], PAGE.name, "exec"), names)
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    return names["Trainer"]


def model():
    torch.manual_seed(0)
    tasks = importlib.import_module("ultralytics.nn.tasks")
    config = tasks.yaml_model_load("yolo11n.yaml")
    depth, width, _ = config["scales"]["n"]
    config["scales"]["n"] = [depth, width, CHANNELS]
    return tasks.DetectionModel(config, nc=3, verbose=False)


def optimizer_of(cls, net, name):
    made = cls.__new__(cls)
    made.args, made.data = SimpleNamespace(), {"nc": 3}
    return made.build_optimizer(net, name=name, lr=0.01, momentum=0.9, decay=5e-4)


def step(net, optimizer, index):
    generator = torch.Generator().manual_seed(index)
    for weight in net.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("name", ["MuSGD", "SGD", "AdamW"])
def test_the_trainer_of_the_page_steps_as_its_base(trainer, name):
    """Muon's part to the digits of a bfloat16 iteration, all else to those of float32."""
    theirs, ours = model(), model()
    of_theirs = optimizer_of(trainer.__bases__[0], theirs, name)
    of_ours = optimizer_of(trainer, ours, name)
    assert type(of_ours) is getattr(optim, name)
    assert [len(group["params"]) for group in of_ours.param_groups] == [
        len(group["params"]) for group in of_theirs.param_groups
    ]
    start = [weight.detach().clone() for weight in ours.parameters()]
    for index in range(2):
        step(theirs, of_theirs, index)
        step(ours, of_ours, index)
    if name != "MuSGD":
        assert_native(of_ours)
    in_muon = {
        id(weight)
        for group in of_ours.param_groups
        if group.get("use_muon")
        for weight in group["params"]
    }
    assert bool(in_muon) == (name == "MuSGD")
    for before, weight, other in zip(start, ours.parameters(), theirs.parameters(), strict=True):
        moved, expected = weight.detach() - before, other.detach() - before
        assert expected.any()
        bound = 0.1 if id(weight) in in_muon else 1e-4
        assert (moved - expected).norm() <= bound * expected.norm()
