"""GaLore layer by layer: low-rank states, and gradients that live as long as their bucket."""

import recipe

import fusedstep
from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device)
    optimizer = optim.create("galoreadamw", model, lr=1e-2, rank=16, svd="randomized")
    with (
        fusedstep.step_in_backward(optimizer, bucket_cap_mb=0),
        recipe.Run(args.device, args.steps) as run,
    ):
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()  # steps, and frees gradients
            optimizer.step()  # ends the iteration
            run.add(loss.detach(), len(tokens))
    return run


if __name__ == "__main__":
    main()
