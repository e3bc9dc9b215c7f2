"""Adafactor: second moments of rows and columns take next to no memory; steps in bfloat16."""

import recipe
import torch

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device, torch.bfloat16)
    # Steps of the size of a weight, as in the paper; bfloat16 weights take steps of a few bits, and
    # random rounding keeps on average what they lose.
    optimizer = optim.Adafactor(model.parameters(), lr=2e-2, rounding="stochastic", seed=0)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(zero_grad="none")
            run.add(loss, len(tokens))
            if len(run.losses) == 1:
                states = sum(v.nbytes for each in optimizer.state.values() for v in each.values())
                weights = sum(weight.nbytes for weight in model.parameters())
                print(f"states: {states / weights:.2f} of the weights' bytes")
    return run


if __name__ == "__main__":
    main()
