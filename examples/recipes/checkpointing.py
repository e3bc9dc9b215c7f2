"""Activation checkpointing: a layer's activations are computed again in the backward pass."""

import recipe

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel(checkpointing=True).to(args.device)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(zero_grad="none")
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
