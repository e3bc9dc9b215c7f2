"""LoRA by peft: frozen weights have no gradients, and so no states."""

import peft
import recipe
from hf_trainer import gpt2

from fusedstep import optim


def main(argv: list[str] | None = None) -> recipe.Run:
    args = recipe.arguments(__doc__).parse_args(argv)
    config = peft.LoraConfig(
        r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(gpt2(), config).to(args.device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    with recipe.Run(args.device, args.steps) as run:
        for tokens in recipe.batches(args.steps, args.batch, args.device):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            run.add(loss, len(tokens))
    return run


if __name__ == "__main__":
    main()
