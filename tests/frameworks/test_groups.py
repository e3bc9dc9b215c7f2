"""`optim.groups` of models of transformers, timm and peft, from small configurations."""

import importlib

import pytest
import torch

from fusedstep import optim
from fusedstep._models.roles import roles_of
from support.small import need

need("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
LLAMA = SIZES | {"num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 8} | SIZES


def of_transformers(name, config, **options):
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 96}
    return of_transformers("GPT2LMHeadModel", "GPT2Config", **sizes)


def of_timm(name, **options):
    return pytest.importorskip("timm").create_model(name, num_classes=4, **options)


def timm_vit():
    pytest.importorskip("timm")
    module = importlib.import_module("timm.models.vision_transformer")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return module.VisionTransformer(num_classes=4, **sizes)


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA), config)


def lora_of_fused_layers():
    """Of query, key and value with unequal rows, and of a gate with its value."""
    peft = pytest.importorskip("peft")
    model = of_transformers("Phi3ForCausalLM", "Phi3Config", **LLAMA, pad_token_id=0)
    config = peft.LoraConfig(r=4, target_modules=["qkv_proj", "gate_up_proj"])
    return peft.get_peft_model(model, config)


#: For each model how many weights have a role, how many have an option in Muon's groups, and what
#: is told.
MODELS = {
    "GPT-2": (
        gpt2,
        {"fused qkv": 2, "matrix": 6, "tied embedding": 1, "embedding": 1, "norm": 10, "bias": 8},
        {},
        "c_attn.weight: guessed by the 32 inputs of c_proj: q, k and v lie along columns",
    ),
    "Llama, grouped queries": (
        lambda: of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        {"matrix": 14, "embedding": 1, "head": 1, "norm": 5},
        {},
        "",
    ),
    "Phi-3, grouped queries in one weight": (
        lambda: of_transformers("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **LLAMA),
        {"matrix": 4, "fused qkv": 2, "fused gate": 2, "embedding": 1, "head": 1, "norm": 5},
        {("split_heads", 2): 2},
        "guessed by the 32 inputs of o_proj: q, k, v of 32, 16 and 16 rows are one matrix, "
        "and three with split_sizes=(32, 16, 16)",
    ),
    "Mixtral": (
        lambda: of_transformers(
            "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **LLAMA
        ),
        {"matrix": 8, "experts": 4, "router": 2, "embedding": 1, "head": 1, "norm": 5},
        {("split_heads", 2): 2},
        "gate_up_proj: guessed by the 64 inputs of down_proj: gate and value are equal blocks",
    ),
    "GPT-OSS, experts in columns": (
        lambda: of_transformers(
            "GptOssForCausalLM", "GptOssConfig", num_local_experts=4, head_dim=8, **LLAMA
        ),
        {"vector": 2, "matrix": 8, "bias": 14, "experts": 4, "router": 2, "embedding": 1}
        | {"head": 1, "norm": 5},
        {},
        "gate_up_proj: guessed by the 64 inputs of down_proj: gate and value lie along columns",
    ),
    "Mamba": (
        lambda: of_transformers("MambaForCausalLM", "MambaConfig", **SIZES),
        {"vector": 4, "matrix": 8, "depthwise convolution": 2, "bias": 4, "tied embedding": 1}
        | {"norm": 3},
        {},
        "",
    ),
    "wav2vec 2.0, with a weight norm": (
        lambda: of_transformers(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", num_conv_pos_embedding_groups=4, **SIZES
        ),
        {"vector": 2, "convolution": 7, "first convolution": 1, "matrix": 13, "head": 1}
        | {"norm": 14, "bias": 15},
        {("split_heads", 4): 1},
        "conv_layers.0.conv.weight: guessed: the first of the model",
    ),
    "BERT": (
        lambda: of_transformers("BertForMaskedLM", "BertConfig", **SIZES),
        {"matrix": 13, "tied embedding": 1, "embedding": 2, "norm": 12, "bias": 14},
        {},
        "",
    ),
    "BERT without a head": (
        lambda: of_transformers("BertModel", "BertConfig", **SIZES),
        {"matrix": 13, "embedding": 3, "norm": 10, "bias": 13},
        {},
        "",
    ),
    "ViT": (
        lambda: of_transformers("ViTForImageClassification", "ViTConfig", **IMAGES),
        {"matrix": 12, "first convolution": 1, "head": 1, "position": 2, "norm": 10, "bias": 14},
        {},
        "",
    ),
    "ViT of timm": (
        timm_vit,
        {"fused qkv": 2, "matrix": 6, "first convolution": 1, "head": 1}
        | {"position": 2, "norm": 10, "bias": 10},
        {("split_heads", 3): 2},
        "qkv.weight: guessed by the 32 inputs of proj: q, k and v are equal blocks of rows",
    ),
    "ResNet of timm": (
        lambda: of_timm("resnet18"),
        {"convolution": 19, "first convolution": 1, "head": 1, "norm": 40, "bias": 1},
        {},
        "conv1.weight: guessed: the first of the model",
    ),
    "ResNeXt of timm": (
        lambda: of_timm("resnext50_32x4d"),
        {"convolution": 52, "first convolution": 1, "head": 1, "norm": 106, "bias": 1},
        {("split_heads", 32): 16},
        "conv1.weight: guessed: the first of the model",
    ),
    "adapters": (
        lora,
        {"matrix": 14, "embedding": 1, "LoRA": 8, "head": 1, "norm": 5},
        {},
        "",
    ),
    "adapters of fused layers": (
        lora_of_fused_layers,
        {"matrix": 4, "fused qkv": 2, "fused gate": 2, "embedding": 1, "LoRA": 8, "head": 1}
        | {"norm": 5},
        {("split_heads", 2): 2},
        "qkv_proj.base_layer.weight: guessed by the 32 inputs of o_proj: q, k, v of 32, 16 and 16",
    ),
}


def counted(items):
    return {item: items.count(item) for item in dict.fromkeys(items)}


@pytest.mark.parametrize("name", MODELS)
def test_roles(name):
    make, expected, options, note = MODELS[name]
    model = make()
    assert counted([each.role for each in roles_of(model)]) == expected
    groups = optim.groups(model, for_="muon")
    set_ = [
        ("split_heads", group["split_heads"])
        for group in groups
        if "split_heads" in group
        for _ in group["params"]
    ]
    assert counted(set_) == options
    told = str(groups).splitlines()
    assert any(note in line for line in told) if note else "guessed" not in str(groups)


@pytest.mark.parametrize("name", ["muon", "musgd", "galoreadamw", "apolloadamw", "adamw8bit"])
@pytest.mark.parametrize("model", [name for name in MODELS if "ResNe" not in name])
def test_each_class_takes_them(model, name):
    """Every trained weight moves in a step, and no other."""
    model = MODELS[model][0]()
    optimizer = optim.create(name, model, lr=0.1)
    before = {each: weight.detach().clone() for each, weight in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    for each, weight in model.named_parameters():
        assert torch.equal(weight, before[each]) != weight.requires_grad, each


def test_decay_as_timms_own_factory():
    """The weights that timm does not decay, from its own rule."""
    timm = pytest.importorskip("timm.optim")
    model = timm_vit()
    theirs = timm.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1).param_groups
    ours = optim.create("adamw", model, lr=1e-3, weight_decay=0.1, no_decay="auto").param_groups
    undecayed = [
        {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
        for groups in (theirs, ours)
    ]
    assert undecayed[0] == undecayed[1]
