"""Plots the figures that mnist and mnist.py write with --json, as in docs/mnist.md.

    plot.py LONG FUSED UNFUSED PLOT

LONG is a run of several epochs; FUSED and UNFUSED are first epochs with `--log-interval 1`.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator


def read_report(text: str) -> dict:
    return json.loads(Path(text).read_text())


def plot_epochs(axes: Axes, report: dict) -> None:
    """Accuracy and loss on the test set after each epoch."""
    epochs = [epoch["epoch"] for epoch in report["epochs"]]
    accuracy = [100 * epoch["accuracy"] for epoch in report["epochs"]]
    loss = [epoch["loss"] for epoch in report["epochs"]]
    axes.plot(epochs, accuracy, "o-", color="tab:blue")
    axes.set_title("Test set")
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy, %", color="tab:blue")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    loss_axes = axes.twinx()
    loss_axes.plot(epochs, loss, "s--", color="tab:orange", markersize=4)
    loss_axes.set_ylabel("average loss", color="tab:orange")
    loss_axes.set_ylim(bottom=0)


def plot_agreement(axes: Axes, fused: dict, unfused: dict) -> None:
    """The training loss of fused and unfused steps, and how far they are apart."""
    first, second = (
        np.array(report["epochs"][0]["training_losses"]) for report in (fused, unfused)
    )
    steps = np.unique(np.geomspace(1, len(first), 200).astype(int))  # evenly on the axis
    first, second = first[steps - 1], second[steps - 1]
    axes.loglog(steps, second, color="tab:gray", linewidth=2, label="unfused")
    axes.loglog(steps, first, color="tab:blue", linewidth=0.7, label="fused")
    apart = np.abs(first - second)
    shown = apart > 0
    axes.loglog(steps[shown], apart[shown], ".", color="tab:red", ms=3, label="|fused - unfused|")
    axes.set_title("Training loss of the first epoch")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("long", "fused", "unfused"):
        parser.add_argument(name, type=read_report, metavar=name.upper())
    parser.add_argument("plot", type=Path, metavar="PLOT")
    arguments = parser.parse_args()

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    plot_epochs(left, arguments.long)
    plot_agreement(right, arguments.fused, arguments.unfused)
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
