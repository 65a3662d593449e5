"""Models of Hugging Face and timm at their published widths, with random weights, or with none (device ``meta``).

Layers are as many as are asked for: all are alike. ``tiny`` models keep everything but their widths, for values on a
CPU. Needs ``pip install 'tilestream[models]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 512
"""Of tiny models."""


@dataclass(frozen=True)
class Case:
    """Inputs: ``batch`` sequences of ``tokens``, or images."""

    batch: int
    tokens: int = 1

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class RealModel:
    """A model: ``make(layers, tiny)`` builds it on torch's current default device.

    Attributes:
        depth: layers that it really has.
        cases: numbers of rows that are typical of its use.
        constant: whether the user gives his word that weights do not change.
        image: pixels along an edge of what it reads; 0 where it reads tokens.
        tiny_image: the same of the tiny model.
        layout: of images and of convolutions' weights in memory.
    """

    name: str
    depth: int
    make: Callable[[int, bool], nn.Module]
    cases: tuple[Case, ...]
    constant: bool = False
    image: int = 0
    tiny_image: int = 0
    layout: torch.memory_format = torch.contiguous_format

    def inputs(self, case: Case, tiny: bool = False, device: str = "meta") -> tuple[Tensor, ...]:
        """Tokens ``[batch, tokens]`` int64, or images ``[batch, 3, image, image]`` bf16."""
        if self.image:
            edge = self.tiny_image if tiny else self.image
            x = torch.randn(case.batch, 3, edge, edge, device=device, dtype=torch.bfloat16)
            return (x.to(memory_format=self.layout),)
        return (torch.randint(VOCABULARY, (case.batch, case.tokens), device=device),)


def module(model: RealModel, layers: int, tiny: bool = False, device: str = "meta") -> nn.Module:
    """The model in bf16, ready for inference."""
    with torch.device(device):
        made = model.make(layers, tiny)
    made = made.bfloat16().eval().requires_grad_(False)
    return made.to(memory_format=model.layout)  # pyright: ignore[reportCallIssue]


class Logits(nn.Module):
    """The first result of a Hugging Face model, as a tensor."""

    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, return_dict=False, **self.keywords)[0]


TINY = {"hidden_size": 48, "intermediate_size": 520, "num_attention_heads": 4}
"""Of tiny models: hidden layers are too wide for a row stream, as those of real ones are."""
FEW_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}


def _llama(layers: int, tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    sizes = (
        {**TINY, **FEW_HEADS, "vocab_size": VOCABULARY} if tiny else {**LLAMA, "head_dim": 64, "vocab_size": 128_256}
    )
    config = LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    return Logits(LlamaForCausalLM(config), use_cache=False)


def _qwen(layers: int, tiny: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]

    sizes = (
        {**TINY, **FEW_HEADS, "vocab_size": VOCABULARY} if tiny else {**QWEN, "head_dim": 128, "vocab_size": 151_936}
    )
    config = Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    return Logits(Qwen3ForCausalLM(config), use_cache=False)


def _gpt2(layers: int, tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    sizes = {"n_embd": 48, "n_inner": 520, "n_head": 4, "vocab_size": VOCABULARY} if tiny else {}
    return Logits(GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes)), use_cache=False)


def _bert(layers: int, tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertModel  # pyright: ignore[reportMissingImports]

    sizes = {**TINY, "vocab_size": VOCABULARY} if tiny else {}
    return Logits(BertModel(BertConfig(num_hidden_layers=layers, **sizes), add_pooling_layer=False))


def _vit(layers: int, tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTModel  # pyright: ignore[reportMissingImports]

    sizes = {**TINY, "image_size": 64} if tiny else {}
    return Logits(ViTModel(ViTConfig(num_hidden_layers=layers, **sizes), add_pooling_layer=False))


def _mixer(layers: int, tiny: bool) -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer  # pyright: ignore[reportMissingImports]

    if tiny:
        return MlpMixer(VOCABULARY, 64, patch_size=16, num_blocks=layers, embed_dim=48, mlp_ratio=(0.5, 11.0))
    return MlpMixer(1000, 224, patch_size=16, num_blocks=layers, embed_dim=768)


def _resnet(layers: int, tiny: bool) -> nn.Module:
    """ResNet-50's bottlenecks where ``layers`` is 16, else as many in each of its four stages."""
    from timm.models.resnet import Bottleneck, ResNet  # pyright: ignore[reportMissingImports]

    counts = (3, 4, 6, 3) if layers == RESNET_DEPTH else (layers,) * 4
    return ResNet(Bottleneck, counts, num_classes=VOCABULARY if tiny else 1000)


RESNET_DEPTH = 16
DECODED = (Case(1), Case(16), Case(128))
PREFILLED = (Case(1, 512), Case(8, 128), Case(32, 512))

MODELS = {
    m.name: m
    for m in (
        RealModel("llama-3.2-1b", 16, _llama, (*DECODED, *PREFILLED)),
        RealModel("qwen3-0.6b", 28, _qwen, (*DECODED, *PREFILLED)),
        RealModel("gpt2", 12, _gpt2, (*DECODED, *PREFILLED)),
        RealModel("gpt2, constant weights", 12, _gpt2, (*DECODED, *PREFILLED[:1]), constant=True),
        RealModel("bert-base", 12, _bert, (Case(1, 16), Case(1, 128), *PREFILLED)),
        RealModel("vit-base", 12, _vit, (Case(1, 197), Case(32, 197)), image=224, tiny_image=64),
        RealModel("mixer-b16", 12, _mixer, (Case(1, 196), Case(32, 196)), image=224, tiny_image=64),
        RealModel(
            *("resnet50", RESNET_DEPTH, _resnet, (Case(1, 3136), Case(32, 3136))),
            **{"image": 224, "tiny_image": 64, "layout": torch.channels_last},
        ),
    )
}
"""By name. Rows of ViT and Mixer are patches (and a class token); of ResNet pixels of the first stage."""
