"""timm: LAMB by name, for a small vision transformer, with timm's groups and schedule."""

import recipe
import timm.optim
import timm.scheduler
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from fusedstep import integrations

CLASSES, SIDE = 10, 32


def images(steps: int, batch: int, device: str):
    """Yields noisy images of ten patterns, and which pattern each is of."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
    for _ in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        noise = torch.randn(batch, 3, SIDE, SIDE, generator=generator)
        yield (patterns[labels] + 2 * noise).to(device), labels.to(device)


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__, steps=60, batch=64).parse_args(argv)
    integrations.timm.register()
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=SIDE, patch_size=8, num_classes=CLASSES, embed_dim=64, depth=2, num_heads=4
    ).to(args.device)
    optimizer = timm.optim.create_optimizer_v2(model, "fusedlamb", lr=1e-2, weight_decay=0.02)
    schedule = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=args.steps, warmup_t=max(1, args.steps // 10)
    )
    with recipe.Run(args.device, args.steps) as run:
        for step, (batch, labels) in enumerate(images(args.steps, args.batch, args.device)):
            loss = F.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(step + 1)
            run.add(loss, len(batch))
    return run


if __name__ == "__main__":
    main()
