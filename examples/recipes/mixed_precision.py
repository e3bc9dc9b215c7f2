"""Mixed precision: float16 with a GradScaler on a GPU, bfloat16 on the CPU.

With ``fused=True`` the scaler leaves the unscaling to the step, and ``max_norm`` clips in it too.
"""

import recipe
import torch

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    kind = torch.device(args.device).type
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    model = recipe.LanguageModel().to(args.device)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, fused=True, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            with torch.autocast(kind, dtype):
                loss = model.loss(tokens)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
