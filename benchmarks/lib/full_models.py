"""Whole models of transformers and timm at full depth and published widths, with random weights, and three small ones.

``MODELS`` are those that the compiler is measured on; ``FRESH`` twenty others, which were chosen with their sizes
before anything was tuned, and looked at since; ``DRAWN`` were drawn by lot; ``TRAINED`` are steps of some of them.
``model.problem()`` gives a module in bf16, no parameter of which is constant (``varied``), and its inputs.
Convolutional models and their images are channels last.
Needs ``transformers`` and ``timm``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = 224
BF16 = torch.bfloat16


@dataclass(frozen=True)
class FullModel:
    """``make()`` builds the model on torch's current default device.

    Attributes:
        batch: sequences or images.
        tokens: of a sequence; 0 where images are read.
        inputs: what is read, where that is neither.
        layout: of images and of convolutions' weights in memory.
        mixed: parameters and inputs have the dtypes that ``make`` gave them.
        training: what is asked for are gradients of all parameters, without dropout.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: int = 0
    tokens: int = 0
    inputs: Callable[[], tuple[Tensor, ...]] | None = None
    layout: torch.memory_format = torch.contiguous_format
    mixed: bool = False
    training: bool = False

    def problem(self, device: str, tiny: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module, as for inference, and its inputs; ``tiny``: a batch of one."""
        torch.manual_seed(0)
        with torch.device(device):
            made = self.make()
            made = (made if self.mixed else made.bfloat16()).eval().requires_grad_(self.training)
            made = made.to(memory_format=self.layout)  # pyright: ignore[reportCallIssue]
            varied(made)
            batch = 1 if tiny else self.batch
            if self.inputs is not None:
                inputs = tuple(x[:, :256] if x.shape[1] > 20_000 else x[:256] for x in self.inputs())
                inputs = inputs if tiny else self.inputs()
            elif self.tokens:
                inputs = (torch.randint(1000, (batch, self.tokens)),)
            else:
                inputs = (torch.randn(batch, 3, IMAGE, IMAGE, dtype=BF16).to(memory_format=self.layout),)
        return made, inputs


def varied(module: nn.Module, seed: int = 0) -> None:
    """Random values, the same on every device, for parameters whose elements are all equal.

    With a head of zeros all that a model computes is zero, and with a layer scale of 1e-4 a layer does not count: no
    error would be seen. Norms' weights and layer scales are between 0.5 and 1.5, and one less where they begin at zero
    (Gemma's norms add one to theirs); biases, tokens and tables as transformers begins them; weights as large as those
    of a linear layer.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.numel() < 2 or bool((parameter != parameter.flatten()[0]).any()):
                continue
            shape, zero = parameter.shape, not parameter.any()
            drawn = torch.empty(shape, device="cpu")
            if zero and not name.endswith("weight"):
                drawn.normal_(0.0, 0.02, generator=generator)
            elif max(shape) == parameter.numel():
                drawn.uniform_(-0.5, 0.5, generator=generator).add_(0.0 if zero else 1.0)
            else:
                drawn.normal_(0.0, shape[1:].numel() ** -0.5, generator=generator)
            parameter.copy_(drawn)


class First(nn.Module):
    """The first result of a model of transformers, as a tensor."""

    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, return_dict=False, **self.keywords)[0]


def hugging_face(model: str, config: str, wrap: dict[str, Any] | None = None, **sizes: Any) -> Callable[[], nn.Module]:
    """A class of transformers with a configuration; ``wrap``: what its ``forward`` is given beside the input."""

    def make() -> nn.Module:
        import transformers  # pyright: ignore[reportMissingImports]

        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return First(made, **(wrap or {}))

    return make


def of_timm(name: str, **keywords: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(name, pretrained=False, **keywords)

    return make


class Gated(nn.Module):
    """SwiGLU in bf16 beside a residual stream in float32."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).to(self.down.weight.dtype)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)).to(x.dtype)


class CrossNetwork(nn.Module):
    """DCN: three cross layers 456 wide beside 456-640-320-80, joined, a score."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(456, 456) for _ in range(3))
        self.deep = nn.ModuleList(nn.Linear(a, b) for a, b in ((456, 640), (640, 320), (320, 80)))
        self.score = nn.Linear(456 + 80, 1)

    def forward(self, x: Tensor) -> Tensor:
        crossed = deep = x
        for layer in self.cross:
            crossed = x * layer(crossed) + crossed
        for layer in self.deep:
            deep = F.relu(layer(deep))
        return torch.sigmoid(self.score(torch.cat([crossed, deep], -1)))


class Towers(nn.Module):
    """Two towers, one of which reads its rows from a transposed tensor, joined, and a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(100, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(60, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 16))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.softmax(self.head(torch.cat([self.left(left), self.right(right.t())], -1)), -1)


LAST = torch.channels_last
UNCACHED = {"use_cache": False}
SMOL: dict[str, Any] = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
QWEN: dict[str, Any] = {
    **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
GEMMA: dict[str, Any] = {
    **{"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262_144},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
}
ELECTRA: dict[str, Any] = {
    **{"embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024},
    **{"num_hidden_layers": 12, "num_attention_heads": 4},
}
DEBERTA = {
    **{"vocab_size": 128_100, "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 256},
    **{
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_position_embeddings": 512,
    },
    **{"position_biased_input": False, "max_relative_positions": -1},
}
PYTHIA: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
NEO: dict[str, Any] = {
    **{"hidden_size": 768, "num_layers": 12, "num_heads": 12, "max_position_embeddings": 2048, "window_size": 256},
    **{"attention_types": [[["global", "local"], 6]], "vocab_size": 50_257},
}
MODERN: dict[str, Any] = {"reference_compile": False, "pad_token_id": 0}
QWEN3: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
}
OLMO: dict[str, Any] = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 100_352},
    **{"num_attention_heads": 16, "num_key_value_heads": 16},
}
FALCON: dict[str, Any] = {
    **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50_304},
    **{"alibi": False, "bias": True, "multi_query": False, "parallel_attn": False},
}
T5: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
CLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 32,
}


def _swiglu() -> tuple[Tensor, ...]:
    return (torch.randn(24_579, 320),)


def _crossed() -> tuple[Tensor, ...]:
    return (torch.randn(16_384, 456, dtype=BF16),)


def _towers() -> tuple[Tensor, ...]:
    return torch.randn(98_304, 100, dtype=BF16), torch.randn(60, 98_304, dtype=BF16)


def _table(*models: FullModel) -> dict[str, FullModel]:
    return {m.name: m for m in models}


MODELS = _table(
    FullModel("bert-base", hugging_face("BertModel", "BertConfig"), 8, 128),
    FullModel("vit-b16", of_timm("vit_base_patch16_224"), 8),
    FullModel("vit-tiny16", of_timm("vit_tiny_patch16_224"), 64),
    FullModel("swin-t", of_timm("swin_tiny_patch4_window7_224"), 16),
    FullModel("mixer-s16", of_timm("mixer_s16_224"), 32),
    FullModel("gpt2", hugging_face("GPT2LMHeadModel", "GPT2Config", UNCACHED), 4, 256),
    FullModel("smollm-135m", hugging_face("LlamaForCausalLM", "LlamaConfig", UNCACHED, **SMOL), 4, 512),
    FullModel("convnext-t", of_timm("convnext_tiny"), 32, layout=LAST),
    FullModel("efficientnet-b0", of_timm("efficientnet_b0"), 64, layout=LAST),
    FullModel("swiglu-f32", lambda: nn.Sequential(Gated(320, 864), Gated(320, 864)), inputs=_swiglu, mixed=True),
    FullModel("cross-network", CrossNetwork, inputs=_crossed),
    FullModel("two-towers", Towers, inputs=_towers),
)
"""Those of issue and findings, which the compiler is measured on."""

FRESH = _table(
    FullModel("distilbert", hugging_face("DistilBertModel", "DistilBertConfig"), 16, 128),
    FullModel(
        *("albert-base", hugging_face("AlbertModel", "AlbertConfig", hidden_size=768, intermediate_size=3072)), 8, 256
    ),
    FullModel("electra-small", hugging_face("ElectraModel", "ElectraConfig", **ELECTRA), 32, 128),
    FullModel("mpnet-base", hugging_face("MPNetModel", "MPNetConfig"), 16, 128),
    FullModel("deberta-v3-small", hugging_face("DebertaV2Model", "DebertaV2Config", **DEBERTA), 8, 128),
    FullModel("t5-small-encoder", hugging_face("T5EncoderModel", "T5Config", **T5), 16, 256),
    FullModel("opt-125m", hugging_face("OPTForCausalLM", "OPTConfig", UNCACHED), 4, 512),
    FullModel("pythia-160m", hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", UNCACHED, **PYTHIA), 4, 512),
    FullModel("qwen2-0.5b", hugging_face("Qwen2ForCausalLM", "Qwen2Config", UNCACHED, **QWEN), 2, 512),
    FullModel("gemma3-270m", hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", UNCACHED, **GEMMA), 2, 512),
    FullModel("clip-vit-b32", hugging_face("CLIPVisionModel", "CLIPVisionConfig", **CLIP), 64),
    FullModel("dinov2-s14", of_timm("vit_small_patch14_dinov2", img_size=IMAGE), 32),
    FullModel("deit-s16", of_timm("deit_small_patch16_224"), 64),
    FullModel("beit-b16", of_timm("beit_base_patch16_224"), 16),
    FullModel("coatnet-0", of_timm("coatnet_0_rw_224"), 16, layout=LAST),
    FullModel("poolformer-s12", of_timm("poolformer_s12"), 32, layout=LAST),
    FullModel("regnety-3.2gf", of_timm("regnety_032"), 32, layout=LAST),
    FullModel("mobilenetv3-large", of_timm("mobilenetv3_large_100"), 128, layout=LAST),
    FullModel("efficientformer-l1", of_timm("efficientformer_l1"), 64, layout=LAST),
    FullModel("resmlp-12", of_timm("resmlp_12_224"), 64),
)
"""Chosen before anything was tuned. What the slowest of them spend their time on was then mended, so they are no longer
unseen: GELU behind products, patches, convolutions of groups, masks and heads of decoders."""

DRAWN = _table(
    FullModel("resnext50-32x4d", of_timm("resnext50_32x4d"), 64, layout=LAST),
    FullModel("twins-svt-s", of_timm("twins_svt_small"), 32),
    FullModel("ghostnet-100", of_timm("ghostnet_100"), 128, layout=LAST),
    FullModel("cait-xxs24", of_timm("cait_xxs24_224"), 32),
    FullModel("efficientnetv2-t", of_timm("efficientnetv2_rw_t"), 32, layout=LAST),
    FullModel("regnetx-1.6gf", of_timm("regnetx_016"), 64, layout=LAST),
    FullModel("pvt-v2-b1", of_timm("pvt_v2_b1"), 32),
    FullModel("gpt-neo-125m", hugging_face("GPTNeoForCausalLM", "GPTNeoConfig", UNCACHED, **NEO), 4, 512),
    FullModel("modernbert-base", hugging_face("ModernBertModel", "ModernBertConfig", **MODERN), 16, 128),
    FullModel("siglip-b16", hugging_face("SiglipVisionModel", "SiglipVisionConfig"), 16),
    FullModel("qwen3-0.6b", hugging_face("Qwen3ForCausalLM", "Qwen3Config", UNCACHED, **QWEN3), 2, 512),
    FullModel("roberta-base", hugging_face("RobertaModel", "RobertaConfig"), 16, 128),
    FullModel("densenet121", of_timm("densenet121"), 64, layout=LAST),
    FullModel("olmo2-1b", hugging_face("Olmo2ForCausalLM", "Olmo2Config", UNCACHED, **OLMO), 2, 512),
    FullModel("mobilevit-s", of_timm("mobilevit_s"), 64, layout=LAST),
    FullModel("volo-d1", of_timm("volo_d1_224"), 32),
    FullModel("mnasnet-100", of_timm("mnasnet_100"), 128, layout=LAST),
    FullModel("hiera-tiny", of_timm("hiera_tiny_224"), 32),
    FullModel("convmixer-768-32", of_timm("convmixer_768_32"), 32, layout=LAST),
    FullModel("repvgg-a2", of_timm("repvgg_a2"), 64, layout=LAST),
    FullModel("falcon-1b", hugging_face("FalconForCausalLM", "FalconConfig", UNCACHED, **FALCON), 2, 512),
    FullModel("mobilebert", hugging_face("MobileBertModel", "MobileBertConfig"), 16, 128),
)
"""Drawn from families of timm and transformers by lot, with sizes, before any was run; looked at by nobody until they
were measured. Twelve of 46 by ``random.Random(20261129).sample``; from DenseNet on, ten of forty more by
``Random(20261130)``."""
INFERENCE = {"seen": MODELS, "fresh": FRESH, "drawn": DRAWN}


def _steps(*names: str) -> dict[str, FullModel]:
    models = [(MODELS | FRESH | DRAWN)[name] for name in names]
    return _table(*(replace(model, name=f"{model.name}-training", training=True) for model in models))


TRAINED = _steps("bert-base", "vit-tiny16", "swin-t", "roberta-base", "deit-s16", "distilbert", "twins-svt-s")
"""Steps, forward and backward. The first three are the issue's; the others were named before any was measured."""
DRAWN_STEPS = _steps(
    "clip-vit-b32", "mobilenetv3-large", "mobilebert", "regnety-3.2gf", "coatnet-0", "dinov2-s14",
    "gemma3-270m", "opt-125m", "falcon-1b", "albert-base", "qwen2-0.5b", "deberta-v3-small",
)  # fmt: skip
"""Steps of models of ``FRESH`` and ``DRAWN`` that are not in ``TRAINED``, six of 38 by ``Random(20261201).sample``,
and six of the 32 others by ``Random(20261202).sample``; drawn before a step of any was run."""
SETS = {**INFERENCE, "steps": TRAINED, "drawn-steps": DRAWN_STEPS}
EVERY = MODELS | FRESH | DRAWN | TRAINED | DRAWN_STEPS
