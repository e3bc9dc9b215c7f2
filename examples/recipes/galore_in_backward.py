"""GaLore layer by layer: low-rank states, and gradients that live as long as their bucket."""

import recipe

import fusedstep
from fusedstep import optim

RANK = 16


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    known = set(map(id, matrices))
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in known]},
        {"params": matrices, "rank": RANK, "svd": "randomized"},
    ]
    optimizer = optim.GaLoreAdamW(groups, lr=1e-2)
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
