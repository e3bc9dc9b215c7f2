"""transformers: what `python -m fusedstep memory` reads of a config.json."""

import json
import sys

import pytest
import torch

from fusedstep import __main__
from fusedstep.memory.activations import loss_of, trace
from fusedstep.memory.model import load
from probes.memory_of_a_step import peak_of
from support.allocations import peak_of_training
from support.small import need

need("transformers")

import transformers  # noqa: E402

SMALL = {"vocab_size": 500, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(n_layer=4, vocab_size=500)),
    "bert": ("BertForMaskedLM", transformers.BertConfig(num_hidden_layers=4, vocab_size=500)),
    "llama": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=200),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(num_layers=2, vocab_size=500, decoder_start_token_id=0),
    ),
}


def saved(folder, name, bare=False):
    architecture, config = CONFIGS[name]
    config.architectures = None if bare else [architecture]
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name, tmp_path):
    config = saved(tmp_path, name, bare=True)
    with torch.device("meta"):
        bare = transformers.AutoModel.from_config(config)
    assert load(str(tmp_path / "config.json")).parameters == bare.num_parameters()
    saved(tmp_path, name)
    with torch.device("meta"):
        model = getattr(transformers, CONFIGS[name][0])(config)
    assert load(str(tmp_path)).parameters == model.num_parameters() >= bare.num_parameters()


@pytest.mark.parametrize("name", CONFIGS)
def test_activations(name, tmp_path):
    saved(tmp_path, name)
    found = {}
    for attention in ("flash", "eager"):
        make = load(str(tmp_path), attention).make
        for checkpointing in (False, True):
            size = (2, 128)
            traced = trace(make, size, attention=attention, checkpointing=checkpointing)
            found[attention, checkpointing] = traced.highest
    assert found["flash", False] < found["eager", False]
    assert found["eager", True] < found["eager", False]
    assert found["flash", True] < found["flash", False]


def test_a_step_of_gpt2_peaks_at_what_is_told(tmp_path):
    """With dropout, which on the CPU takes the matrices of attention."""
    architecture, config = CONFIGS["gpt2"]
    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=1000, architectures=[architecture]
    )
    config.save_pretrained(tmp_path)
    model = load(str(tmp_path), "eager")
    traced = trace(model.make, (4, 128), attention="eager")

    real, tokens = model.make().train(), torch.zeros(4, 128, dtype=torch.long)

    def forward_and_backward():
        loss, output = loss_of(real, tokens)
        loss.backward()
        del loss, output

    gradients = 4 * model.trained_elements
    told = gradients + traced.beside(gradients, 1, accumulate=False)
    assert told == pytest.approx(peak_of(forward_and_backward), rel=0.1)


def with_adapters():
    """A model whose attention has adapters of rank 4."""
    from peft import LoraConfig, get_peft_model

    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=200)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def test_adapters_of_peft_have_activations():
    """peft moves each adapter as it adds it."""
    pytest.importorskip("peft")
    real, tokens = with_adapters().train(), torch.zeros(4, 128, dtype=torch.long)
    traced = trace(with_adapters, (4, 128))

    def forward_and_backward():
        loss, output = loss_of(real, tokens)
        loss.backward()
        del loss, output

    gradients = 4 * sum(p.numel() for p in real.parameters() if p.requires_grad)
    told = gradients + traced.beside(gradients, 1, accumulate=False)
    assert told == pytest.approx(peak_of(forward_and_backward), rel=0.1)


@pytest.mark.parametrize("more", [(), ("--checkpointing", "--weights", "bf16")], ids=["", "less"])
def test_lines_of_adapters_run_and_peak_at_what_is_told(tmp_path, capsys, monkeypatch, more):
    pytest.importorskip("peft")
    saved(tmp_path, "llama")
    asked = ("--optimizer", "AdamW", "--batch", "2", "--sequence", "64", "--lora", "4", "--json")
    fit = ("--fit", "100MB", "--headroom", "0B", *more)
    monkeypatch.setattr(sys, "argv", ["fusedstep", "memory", str(tmp_path), *asked, *fit])
    __main__.main()
    found = json.loads(capsys.readouterr().out)
    (way,) = (each for each in found["fits"] if each["lora"])
    peak = peak_of_training(way, load(str(tmp_path)).make, (2, 64))
    assert way["bytes"]["total"] == pytest.approx(peak, rel=0.1)


def test_a_file_that_is_no_configuration(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"MODEL .*config\.json does not exist"):
        load(str(file))
    file.write_text('{"model_type": "nonsense"}')
    with pytest.raises(ValueError, match=r"MODEL .*config\.json is no configuration"):
        load(str(file))
