"""The figures that Adan's authors published for their fused kernel over 25 sizes of GPT-2.

Source: fused_adan/README.md of https://github.com/sail-sg/Adan, on one A100 of 40 GB.
Vocabulary 49,280, one sequence of 2,048 tokens. They don't say what the figures are, but it shows:

- Every peak is a multiple of 2 MiB in units of 10^6 bytes, rounded down: the memory that torch's
  allocator had reserved, not only what tensors took of it.
- Most peaks are the same for both optimizers, though Adan has two states more. So a step was
  measured whose forward and backward ran before there were states: the first.
- Times are of one step, the mean over 200: what their title names, 200 steps in 82 ms, would be
  some 90 TB/s.
- Adam is torch's for-loop, the default of torch 1.13 on which they were made: with little work it
  takes 56 μs a tensor, whatever the size.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE = "A100"

#: The names of what is compared: torch's Adam, and Adan alone and over all weights at once.
ADAM, ADANS = "adam_for_loop", ("adan_single", "adan_multi")


@dataclass(frozen=True)
class Published:
    heads: int
    layers: int
    embedding: int
    millions: int
    """Parameters, rounded down."""
    adam_peak: int
    adan_peak: int
    """10^6 bytes."""
    adam_ms: float
    adan_ms: float

    def __str__(self) -> str:
        return f"{self.heads}x{self.layers}x{self.embedding}"

    @property
    def difference(self) -> float:
        """The difference of the peaks, in percent."""
        return 100 * (self.adan_peak / self.adam_peak - 1)

    @property
    def ratio(self) -> float:
        """The ratio of the times. They print 81.6 % for the first size, but it is 75 %."""
        return self.adan_ms / self.adam_ms


# heads, layers, embedding, parameters, peaks of Adam and Adan, times of Adam and Adan
_TABLE = """
 6  6  768   81  4490  4490  5.40  4.07
12  6  768   81  5848  5848  5.41  4.16
16  6  768   81  6775  6775  5.41  4.11
 6 12  768  124  7151  7153  8.47  6.25
12 12  768  124  9869  9871  8.46  6.18
16 12  768  124 11733 11735  8.48  6.20
16  6 1024  128  7302  7302  7.57  6.28
16 12 1024  203 12719 12719 12.10 10.25
 6 24  768  209 12471 12473 16.40 10.56
12 24  768  209 17907 17909 16.40 10.47
16 24  768  209 21596 21598 16.35 10.56
 6  6 1536  248  6880  7308 15.92 12.29
12  6 1536  248  8235  8235 15.94 12.35
16  6 1536  248  9141  9141 15.94 12.36
16 24 1024  354 23530 23532 21.05 17.51
16  6 2048  407 11098 11098 25.05 19.84
 6 12 1536  418 11137 12213 27.24 20.58
12 12 1536  418 13855 13857 27.25 20.54
16 12 1536  418 15667 15669 27.25 20.46
16  6 2560  603 13967 15965 36.86 29.55
16 12 2048  709 18851 18853 44.00 34.89
 6 24 1536  758 19660 21997 49.87 37.52
12 24 1536  758 25096 25100 49.87 37.42
16 24 1536  758 28720 28724 49.92 37.56
16 24 2048 1313 34357 34363 81.81 64.48
"""


def _published(line: str) -> Published:
    *whole, adam_ms, adan_ms = line.split()
    return Published(*map(int, whole), float(adam_ms), float(adan_ms))


PUBLISHED = {str(each): each for each in map(_published, _TABLE.strip().splitlines())}
