"""bfloat16 weights and gradients; the step keeps the lower 16 bits of the weights beside them."""

import recipe
import torch

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device, torch.bfloat16)
    optimizer = optim.AdamW(
        model.parameters(),
        lr=3e-3,
        state_dtype=torch.float32,
        master_weights="split",
    )
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
