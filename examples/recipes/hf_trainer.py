"""transformers' Trainer, which takes an optimizer as a name, a class or an object."""

import tempfile

import recipe
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fusedstep import integrations, optim


def main(argv: list[str] | None = None) -> recipe.Run:
    parser = recipe.arguments(__doc__)
    parser.add_argument("--way", choices=["name", "class", "object"], default="name")
    args = parser.parse_args(argv)
    pieces = recipe.batches(1, args.steps * args.batch, "cpu")
    data = [{"input_ids": tokens, "labels": tokens} for tokens in next(pieces)]
    model = gpt2()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            optim="adamw_torch_fused",
            learning_rate=3e-3,
            weight_decay=0.01,
            max_grad_norm=1.0,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            use_cpu=args.device == "cpu",
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
        )
        trainer = TRAINERS[args.way](model, arguments, data)
        trainer.remove_callback(PrinterCallback)
        with recipe.Run(args.device, args.steps) as run:
            trainer.add_callback(Losses(run, args.batch))
            trainer.train()
    return run


class Losses(TrainerCallback):
    """Hands the loss of each step on to a run."""

    def __init__(self, run: recipe.Run, batch: int) -> None:
        self.run, self.batch = run, batch

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.run.add(logs["loss"], self.batch)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    _, symbols = recipe.encoded()
    config = GPT2Config(
        vocab_size=symbols,
        n_positions=recipe.LENGTH + 1,
        n_embd=64,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def by_name(model, arguments, data):
    """After ``register()`` the names of transformers select classes of fusedstep."""
    integrations.transformers.register()
    return Trainer(model=model, args=arguments, train_dataset=data)


def by_class(model, arguments, data):
    """Trainer makes the groups, with and without weight decay."""
    options = {"lr": arguments.learning_rate, "betas": (0.9, 0.999), "eps": 1e-8}
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        optimizer_cls_and_kwargs=(optim.AdamW, options),
    )


def by_object(model, arguments, data):
    """Trainer makes the schedule."""
    optimizer = optim.create(
        "adamw",
        model,
        lr=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        no_decay="auto",
    )
    return Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))


TRAINERS = {"name": by_name, "class": by_class, "object": by_object}

if __name__ == "__main__":
    main()
