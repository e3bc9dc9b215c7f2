"""transformers' Trainer for tests/frameworks: a small model, its data and arguments."""

import torch

STEPS = 4
WORDS = 32


def gpt2(transformers, width=16):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=width, n_layer=1, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama(transformers, width=16):
    """One whose matrices are in linear layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        max_position_embeddings=16,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def texts(count=64):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (count, 8), generator=generator)
    return [{"input_ids": line, "labels": line} for line in words]


def arguments(transformers, folder, **options):
    return transformers.TrainingArguments(
        **{"output_dir": str(folder), "max_steps": STEPS, "use_cpu": True, "report_to": []}
        | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        | {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
        | {"learning_rate": 5e-3, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
        | {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
        | options
    )


def trainer(transformers, args, model=gpt2, **options):
    return transformers.Trainer(
        model=model(transformers), args=args, train_dataset=texts(), **options
    )


def losses_of(it):
    return [entry["loss"] for entry in it.state.log_history if "loss" in entry]


def inner(it):
    """The optimizer that Accelerate has wrapped."""
    return getattr(it.optimizer, "optimizer", it.optimizer)
