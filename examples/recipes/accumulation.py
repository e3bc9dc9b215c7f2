"""Gradient accumulation: the activations of a part of the batch, the step of all of it."""

import recipe

from fusedstep import optim

PARTS = 4


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            whole = 0.0
            for part in tokens.chunk(PARTS):
                loss = model.loss(part) * (len(part) / len(tokens))
                loss.backward()
                whole = whole + loss.detach()
            # Gradients that are zeroed, not freed, stay where the next parts add to them.
            optimizer.step(max_norm=1.0, zero_grad=True)
            run.add(whole, len(tokens))
    return run


if __name__ == "__main__":
    main()
