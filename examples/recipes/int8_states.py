"""States of 8 bits; embeddings keep theirs in 32, as is usual. Checkpoints hold the codes."""

import recipe
import torch

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    model = recipe.LanguageModel().to(args.device)
    embeddings = [*model.tokens.parameters(), *model.places.parameters()]
    of_embeddings = set(embeddings)
    groups = [
        {"params": [weight for weight in model.parameters() if weight not in of_embeddings]},
        {"params": embeddings, "state_dtype": torch.float32},
    ]
    optimizer = optim.AdamW8bit(groups, lr=3e-3)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
