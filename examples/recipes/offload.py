"""A model on a GPU whose states are in the host's memory, where the CPU steps in the backward."""

import recipe
import torch

import fusedstep
from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run | None:
    args = recipe.arguments(__doc__).parse_args(argv)
    if torch.device(args.device).type != "cuda":
        print("skipped: the states of a model on the CPU are in the host's memory already")
        return None
    model = recipe.LanguageModel().to(args.device, torch.bfloat16)
    # Beside bfloat16 weights the host keeps them in float32 too.
    optimizer = fusedstep.offload(optim.AdamW(model.parameters(), lr=3e-3))
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()  # copies gradients, steps and copies weights, bucket by bucket
            optimizer.step()
            optimizer.zero_grad()
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
