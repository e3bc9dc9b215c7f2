"""The shape lists that steps are timed on: the one source for Python and, as a header, for C++.

    shapes.py OUTPUT.h      writes the contiguous lists as a C++ header

Shapes follow from the architectures; tests know their numbers of tensors and elements.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclass(frozen=True)
class ShapeList:
    name: str
    title: str
    shapes: Shapes
    layout: str = "contiguous"
    """The layout of weights. "transposed": as the transposed ones lie; "sliced": every second
    column of wider ones; "channels-last": the dimension of channels innermost, where there are
    four. Gradients of "channels-last" lie as the weights do, those of all others contiguously."""

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def contiguous(self) -> ShapeList:
        """The same shapes, each in one piece."""
        return replace(self, layout="contiguous")

    def __str__(self) -> str:
        return self.name


def resnet50() -> Shapes:
    """He et al. 2016, table 1: convolutions, batch norms (weight, bias) and the classifier."""
    shapes: list[Shape] = []

    def convolution(channels_in: int, channels_out: int, kernel: int) -> None:
        norm = (channels_out,)
        shapes.extend([(channels_out, channels_in, kernel, kernel), norm, norm])

    convolution(3, 64, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(channels, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(channels, 4 * width, 1)
            channels = 4 * width
    return (*shapes, (1000, channels), (1000,))


def gpt2(layers: int, width: int) -> Shapes:
    """Radford et al. 2019: embeddings, blocks and the last layer norm, the output tied."""

    def linear(inputs: int, outputs: int) -> Shapes:
        return (inputs, outputs), (outputs,)

    norm = (width,), (width,)
    attention = *linear(width, 3 * width), *linear(width, width)
    mlp = *linear(width, 4 * width), *linear(4 * width, width)
    return (50257, width), (1024, width), *(norm + attention + norm + mlp) * layers, *norm


def small_tensors(count: int) -> Shapes:
    """Lengths of 64 to 4,096, the same on every machine."""
    generator = random.Random(0)
    return tuple((generator.randint(64, 4096),) for _ in range(count))


def size_name(elements: int) -> str:
    """1024 → "1K"."""
    return f"{elements >> 20}M" if elements % (1 << 20) == 0 else f"{elements >> 10}K"


MODELS = (
    ShapeList("matrix", "[1024, 1024]", ((1024, 1024),)),
    ShapeList("resnet50", "ResNet-50", resnet50()),
    ShapeList("gpt2", "GPT-2 124 M", gpt2(12, 768)),
    ShapeList("gpt2-large", "GPT-2 774 M", gpt2(36, 1280)),
    ShapeList("small", "2,000 small tensors", small_tensors(2000)),
)
LAYOUTS = (
    ShapeList("contiguous", "[4096, 1024]", ((4096, 1024),)),
    ShapeList("transposed", "[4096, 1024] transposed", ((4096, 1024),), "transposed"),
    ShapeList("sliced", "[4096, 1024], every second column", ((4096, 1024),), "sliced"),
    ShapeList("channels-last", "ResNet-50, channels-last", resnet50(), "channels-last"),
)
SIZES = tuple(
    ShapeList(size_name(count), f"{size_name(count)} elements", ((count,),))
    for count in (1 << power for power in range(10, 27, 2))
)
HOST = tuple(
    ShapeList(f"64x{count}", f"{count:,} tensors of 64", ((64,),) * count)
    for count in (1, 10, 100, 500, 1000, 2000, 5000)
)
"""So small that all the time is the host's."""
EMBEDDING = ShapeList("embedding", "[1,000,000, 128]", ((1_000_000, 128),))
ALL = (*MODELS, *LAYOUTS, *SIZES)
QUICK = (
    *(each for each in MODELS if each.name in ("matrix", "resnet50", "small")),
    *(each for each in SIZES if each.elements <= 4 << 20),
)


_HEADER = """\
// Written by bench/suites/shapes.py.
#pragma once
#include <cstdint>
#include <span>

struct ShapeList {{
  const char* name;
  std::span<const int64_t> elements;
}};

{arrays}

inline constexpr ShapeList kShapeLists[] = {{
{lists}
}};
"""


def cpp_header() -> str:
    """The contiguous lists, each tensor as its number of elements."""
    arrays, lists = [], []
    for shape_list in ALL:
        if shape_list.layout == "contiguous":
            name = f"kElements{len(arrays)}"
            elements = ", ".join(str(math.prod(shape)) for shape in shape_list.shapes)
            arrays.append(f"inline constexpr int64_t {name}[] = {{{elements}}};")
            lists.append(f'    {{"{shape_list}", {name}}},')
    return _HEADER.format(arrays="\n".join(arrays), lists="\n".join(lists))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(cpp_header(), encoding="utf-8")
