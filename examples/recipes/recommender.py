"""A recommender with sparse embeddings, of which a step reads and writes the rows of a batch alone.

The table has RowWiseAdagrad, whose states are one number a row, or Adagrad or SparseAdam; the dense
layers have AdamW.
"""

import recipe
import torch
import torch.nn.functional as F
from torch import nn

from fusedstep import optim

ITEMS, FEATURES, WIDTH = 100_000, 8, 16


def clicks(steps: int, batch: int, device: str):
    """Yields items and whether they were clicked, which depends on the first one."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        # A few items are seen often, as is usual.
        items = (ITEMS * torch.rand(batch, FEATURES, generator=generator) ** 8).long()
        yield items.to(device), (items[:, 0] % 2).float().to(device)


def main(argv: list[str] | None = None) -> recipe.Run:
    parser = recipe.arguments(__doc__, steps=200, batch=1024)
    of_tables = {
        "rowwise": optim.RowWiseAdagrad,
        "adagrad": optim.Adagrad,
        "adam": optim.SparseAdam,
    }
    parser.add_argument("--table", choices=of_tables, default="rowwise", help="its optimizer")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    table = nn.Embedding(ITEMS, WIDTH, sparse=True)
    head = nn.Sequential(nn.Linear(FEATURES * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    model = nn.Sequential(table, nn.Flatten(), head).to(args.device)
    of_table = of_tables[args.table](table.parameters(), lr=0.01 if args.table == "adam" else 0.1)
    of_head = optim.AdamW(head.parameters(), lr=1e-2)
    with recipe.Run(args.device, args.steps) as run:
        for items, clicked in clicks(args.steps, args.batch, args.device):
            loss = F.binary_cross_entropy_with_logits(model(items).squeeze(1), clicked)
            loss.backward()
            for optimizer in (of_table, of_head):
                optimizer.step(zero_grad="none")
            run.add(loss, len(items))
    return run


if __name__ == "__main__":
    main()
