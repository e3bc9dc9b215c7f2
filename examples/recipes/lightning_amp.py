"""Lightning with mixed precision and its own clipping, both of which are its Trainer's."""

import lightning
import recipe
import torch

from fusedstep import optim


class Module(lightning.LightningModule):
    def __init__(self, run: recipe.Run) -> None:
        super().__init__()
        self.model, self.run = recipe.LanguageModel(), run

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model.loss(tokens)
        self.run.add(loss, len(tokens))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optim.AdamW(self.parameters(), lr=3e-3)


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    batches = list(recipe.batches(args.steps, args.batch, "cpu"))
    cpu = args.device == "cpu"
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu" if cpu else "gpu",
        devices=1,
        precision="bf16-mixed" if cpu else "16-mixed",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with recipe.Run(args.device, args.steps) as run:
        trainer.fit(Module(run), torch.utils.data.DataLoader(batches, batch_size=None))
    return run


if __name__ == "__main__":
    main()
