"""Accelerate: accumulation, mixed precision, and clipping in the step."""

import recipe
from accelerate import Accelerator

from fusedstep import optim

PARTS = 2


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    accelerator = Accelerator(
        cpu=args.device == "cpu", mixed_precision="bf16", gradient_accumulation_steps=PARTS
    )
    model = recipe.LanguageModel()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps * PARTS, args.batch // PARTS, args.device):
            with accelerator.accumulate(model), accelerator.autocast():
                loss = accelerator.unwrap_model(model).loss(tokens)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                run.add(loss, args.batch)
    return run


if __name__ == "__main__":
    main()
