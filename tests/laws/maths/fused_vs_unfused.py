"""Base of the scripts test_fused_*.py: fused against unfused, as assertions and as a timing.

Needs torch alone, so that the scripts run where no test runner is installed.
"""

import argparse
import statistics
import time

import torch

# Strides and offset of a [rows, columns] view into a buffer, by name.
CONTIGUOUS = {"contiguous": lambda rows, columns: ((columns, 1), 0)}
NON_CONTIGUOUS = {
    "transposed": lambda rows, columns: ((1, rows), 0),
    "sliced columns": lambda rows, columns: ((columns + 7, 1), 3),
    "every second column": lambda rows, columns: ((2 * columns, 2), 0),
    "every third row": lambda rows, columns: ((3 * columns, 1), columns),
}
LAYOUTS = CONTIGUOUS | NON_CONTIGUOUS

# Relative and absolute. The unfused twin rounds after every operation, to bf16 or fp16 as well.
TOLERANCES = {
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-13, 1e-14),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (4e-3, 4e-3),
}


def weight_of_layout(layout, shape, dtype):
    (strides, offset), (rows, columns) = LAYOUTS[layout](*shape), shape
    span = 1 + (rows - 1) * strides[0] + (columns - 1) * strides[1]
    buffer = torch.zeros(offset + span, dtype=dtype)
    weight = buffer.as_strided(shape, strides, offset)
    weight.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return torch.nn.Parameter(weight)


def check(optimizer_class, layouts, **options):
    """Asserts that fused and unfused agree over ten steps, with the gradient in either layout."""
    shape = (61, 130)
    for layout in layouts:
        for dtype, (rtol, atol) in TOLERANCES.items():
            for like_weight in (True, False):
                pair = [weight_of_layout(layout, shape, dtype) for _ in range(2)]
                optimizers = [
                    optimizer_class([weight], fused=fused, **options)
                    for weight, fused in zip(pair, (True, False), strict=True)
                ]
                generator = torch.Generator().manual_seed(1)
                for _ in range(10):
                    # Nothing near zero: unfused divides by the root of its square, 0 in fp16.
                    sign = torch.randn(shape, generator=generator).sign()
                    values = (sign * (0.5 + torch.rand(shape, generator=generator))).to(dtype)
                    for weight, optimizer in zip(pair, optimizers, strict=True):
                        weight.grad = weight.detach().clone() if like_weight else values.clone()
                        weight.grad.copy_(values)
                        optimizer.step()
                torch.testing.assert_close(
                    *pair, rtol=rtol, atol=atol,
                    msg=lambda text, where=f"{layout}, {dtype}": f"{where}: {text}",
                )  # fmt: skip


def milliseconds(optimizer_class, shape, fused, repetitions, **options):
    """Median time of a step with the gradient in place."""
    weight = weight_of_layout("contiguous", shape, torch.float32)
    weight.grad = torch.randn(shape)
    optimizer = optimizer_class([weight], fused=fused, **options)
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[repetitions // 10 :])


def main(name, optimizer_class, **options):
    """The script: checks every layout, then prints the bench of one weight."""
    parser = argparse.ArgumentParser(
        description=f"{name}: fused against unfused, checked and timed"
    )
    parser.add_argument(
        "shape", type=int, nargs="*", default=[1024, 1024], help="rows and columns, 1024 1024"
    )
    shape = tuple(parser.parse_args().shape)
    if len(shape) != 2:
        parser.error("a shape has two numbers: rows and columns")
    check(optimizer_class, LAYOUTS, **options)
    print(f"{name}: fused equals unfused for weights {', '.join(LAYOUTS)}")
    unfused = milliseconds(optimizer_class, shape, False, repetitions=200, **options)
    fused = milliseconds(optimizer_class, shape, True, repetitions=1000, **options)
    print(
        f"{name} optimizer bench: unfused: {unfused:.3f} ms; fused: {fused:.3f} ms "
        f"({unfused / fused:.1f} times faster, {list(shape)})"
    )
