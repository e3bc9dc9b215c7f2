"""LAMB for large batches: warm-up, then a linear decay, with a rate that grows with their root."""

import recipe

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__, steps=40, batch=256).parse_args(argv)
    model = recipe.LanguageModel().to(args.device)
    optimizer = optim.create(
        "lamb",
        model,
        lr=2e-2 * (args.batch / 256) ** 0.5,
        weight_decay=0.01,
        no_decay="auto",
    )
    warmup = max(1, args.steps // 10)
    schedule = optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup),
            optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(1, args.steps - warmup)),
        ],
        [warmup],
    )
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            schedule.step()
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
