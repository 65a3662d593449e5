"""What a decoder's layers consist of: each field is a choice of its own, and a switch of the step's kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tilestream.errors import InputError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
"""As the kernel numbers them."""
NORMS = ("rms", "rms_plus_one", "layer")
"""RMSNorm; the same by one more than its weight, as Gemma's; LayerNorm with weight and bias."""
TOGETHER = ("", "parts", "heads")
"""How products lie in one weight: not at all, one behind the other, or one head's behind the other's."""


@dataclass(frozen=True)
class Form:
    """As ``LlamaForCausalLM`` has it, unless told otherwise.

    Args:
        norm: of ``NORMS``. head_norms: whether every head of queries and keys has one.
        activation: of ``ACTIVATIONS``. gated: whether the product ``up`` multiplies it.
        biased: products with a bias: "query" (keys and values, too), "output", "gate", "down", "head".
        turned: weights are [inputs, outputs], but for the head's.
        qkv: how queries, keys and values lie together, of ``TOGETHER``. gate_up: the same, "" or "parts".
        rotary: the share of a head's features, its first ones, that are rotated; 0: none.
        no_rope: layers, by their numbers, in which they are not, as every fourth of SmolLM3's.
        parallel: the feed-forward block reads what attention reads, not what it has made.
    """

    norm: str = "rms"
    head_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    biased: tuple[str, ...] = ()
    turned: bool = False
    qkv: str = ""
    gate_up: str = ""
    rotary: float = 1.0
    no_rope: tuple[int, ...] = ()
    parallel: bool = False

    @property
    def text(self) -> str:
        """What ``of`` reads."""
        plain = asdict(Form())
        return json.dumps({name: v for name, v in asdict(self).items() if v != plain[name]}, sort_keys=True)

    @staticmethod
    def of(text: str) -> Form:
        """The form that a text says.

        Raises:
            InputError: it is none.
        """
        try:
            given: dict[str, Any] = {**json.loads(text)}
            lists = {name: tuple(given.get(name, ())) for name in ("biased", "no_rope")}
            made = replace(Form(), **given | lists)
        except (ValueError, TypeError) as why:
            raise InputError(f"{text!r} is no form of a decoder: {why}", f"fields are {_names()}") from why
        if made.norm not in NORMS or made.activation not in ACTIVATIONS or made.qkv not in TOGETHER:
            raise InputError(f"{text!r} is no form of a decoder", f"{NORMS}, {ACTIVATIONS}, {TOGETHER}")
        return made

    @property
    def weights(self) -> list[str]:
        """A layer's, in the order of the operator."""
        return list(self._weights())

    def _weights(self) -> Iterator[str]:
        yield from self._norm("norm")
        for name in ("query",) if self.qkv else ("query", "key", "value"):
            yield from self._product(name, "query")
        if self.head_norms:
            yield from ("query_norm", "key_norm")
        yield from self._product("output")
        yield from self._norm("middle_norm")
        yield from self._product("gate")
        if self.gated and not self.gate_up:
            yield "up"
        yield from self._product("down")

    @property
    def last(self) -> list[str]:
        """Weights behind those of layers."""
        return [*self._norm("norm"), *self._product("head")]

    def heads(self, rows: int, key_heads: int, features: int) -> int:
        """Of queries, where the weight ``query`` has so many rows."""
        return rows // features - (2 * key_heads if self.qkv else 0)

    def hidden(self, rows: int) -> int:
        """Features, where the weight ``gate`` has so many rows."""
        return rows // 2 if self.gate_up else rows

    def _norm(self, name: str) -> list[str]:
        return [name, f"{name}_bias"] if self.norm == "layer" else [name]

    def _product(self, name: str, of: str = "") -> list[str]:
        return [name, f"{name}_bias"] if (of or name) in self.biased else [name]


def _names() -> str:
    return ", ".join(field.name for field in fields(Form))


LLAMA = Form()
QWEN3 = Form(head_norms=True)
GPT2 = Form(
    norm="layer", activation="gelu_tanh", gated=False, biased=("query", "output", "gate", "down"), turned=True,
    qkv="parts", rotary=0.0,
)  # fmt: skip
