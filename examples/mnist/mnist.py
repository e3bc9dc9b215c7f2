"""Trains the LeNet-like network of PyTorch's MNIST example with fused LAMB.

The same as mnist.cpp, which with the same seed, threads and options draws the same random numbers.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import data
import idx
import numpy as np
import torch
import torch.nn.functional as F
from progress import progress
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import fusedstep
from fusedstep import optim

MEAN, STANDARD_DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0..1


class Net(nn.Module):
    """Images [n, 1, 28, 28] to the logarithms of their class probabilities [n, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def to_tensors(
    images: np.ndarray, labels: np.ndarray, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Normalized float32 images [n, 1, 28, 28] and int64 labels [n], on a device.

    The whole set is one tensor, 188 MB for MNIST, and a batch one `index_select` from it: that
    takes under 1 % of a step, so there is nothing for the workers of a DataLoader to hide.
    """
    pixels = torch.from_numpy(images).unsqueeze(1).to(torch.float32)
    pixels.div_(255).sub_(MEAN).div_(STANDARD_DEVIATION)
    return pixels.to(device), torch.from_numpy(labels).to(device, torch.int64)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
) -> Iterator[Tensor]:
    """Trains one epoch over the shuffled images and yields the loss of each step."""
    model.train()
    for batch in torch.randperm(len(images)).to(images.device).split(batch_size):
        optimizer.zero_grad()
        output = model(images.index_select(0, batch))
        loss = F.nll_loss(output, labels.index_select(0, batch))
        loss.backward()
        optimizer.step()
        yield loss.detach()


@torch.no_grad()
def test(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> tuple[float, int]:
    """The average loss over all images, and how many were classified correctly."""
    model.eval()
    loss, correct = 0.0, 0
    for batch, targets in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        output = model(batch)
        loss += F.nll_loss(output, targets, reduction="sum").item()
        correct += int((output.argmax(dim=1) == targets).sum())
    return loss / len(images), correct


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small convolutional network on MNIST with LAMB.",
    )

    def add(name: str, text: str, **settings) -> None:
        shown = "" if settings.get("default") is None else " (default: %(default)s)"
        parser.add_argument(name, help=text + shown, **settings)

    add("--data", "folder that holds the MNIST files", metavar="DIR")
    add("--epochs", "epochs to train", type=_positive, default=14, metavar="N")
    add("--batch-size", "images of a training step", type=_positive, default=64, metavar="N")
    add("--test-batch-size", "images of a test batch", type=_positive, default=1000, metavar="N")
    add("--lr", "learning rate of the first epoch", type=float, default=0.01, metavar="X")
    add("--gamma", "its factor from epoch to epoch", type=float, default=0.7, metavar="X")
    add("--seed", "seed of the random numbers", type=int, default=1, metavar="N")
    add("--device", "where to train, as torch names it", default="cpu", metavar="NAME")
    add("--threads", "threads torch uses; 0: its own choice", type=_threads, default=0, metavar="N")
    add("--log-interval", "steps between two losses", type=_positive, default=10, metavar="N")
    add("--json", "file for the figures of each epoch", type=Path, metavar="FILE")
    add("--no-fused", "step in torch operations", action="store_false", dest="fused")
    return parser.parse_args(arguments)


def _natural(text: str, least: int = 0) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def _positive(text: str) -> int:
    return _natural(text, least=1)


def _threads(text: str, most: int = 1024) -> int:
    """Refuses counts of threads of which the system would start a part, and then fail."""
    value = _natural(text)
    if value > most:
        raise argparse.ArgumentTypeError(f"{value} is more than {most}")
    return value


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        folder = data.fetch(options.data)
        train_images, train_labels = to_tensors(*idx.read_set(folder, "train"), options.device)
        test_images, test_labels = to_tensors(*idx.read_set(folder, "t10k"), options.device)
    except (OSError, idx.IdxError, ModuleNotFoundError) as error:
        sys.exit(f"mnist: {error}")

    model = Net().to(options.device)
    optimizer = optim.Lamb(model.parameters(), lr=options.lr, fused=options.fused)
    scheduler = StepLR(optimizer, step_size=1, gamma=options.gamma)
    report = {
        "language": "Python",
        "torch": torch.__version__,
        "isa": fusedstep.isa(),
        "fused": options.fused,
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "gamma": options.gamma,
        "log_interval": options.log_interval,
        "train_images": len(train_images),
        "test_images": len(test_images),
        "epochs": [],
    }
    for epoch in range(1, options.epochs + 1):
        start, losses = time.perf_counter(), []
        steps = -(-len(train_images) // options.batch_size)
        with progress(f"Epoch {epoch}/{options.epochs}", steps) as advance:
            batches = train(model, optimizer, train_images, train_labels, options.batch_size)
            for step, loss in enumerate(batches):
                if step % options.log_interval == 0:
                    losses.append(loss.item())
                advance(1, f"loss {losses[-1]:.4f}")
        seconds = time.perf_counter() - start
        scheduler.step()

        loss, correct = test(model, test_images, test_labels, options.test_batch_size)
        share = correct / len(test_images)
        print(
            f"Test set: Average loss: {loss:.4f}, "
            f"Accuracy: {correct}/{len(test_images)} ({100 * share:.0f}%)",
            flush=True,
        )
        report["epochs"].append(
            {
                "epoch": epoch,
                "loss": loss,
                "accuracy": share,
                "seconds": seconds,
                "training_losses": losses,
            }
        )
        if options.json is not None:
            options.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
