"""A decode step of a whole model as one operator: where it is found, what it computes, where it is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decode_steps import FORMS
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from benchmarks.lib import static_decoders
from benchmarks.lib.static_decoders import Decoder
from tilestream.cuda import cache
from tilestream.devices import H200
from tilestream.graph.capture import capture
from tilestream.graph.decode import STEP
from tilestream.kernels.step.form import GPT2, QWEN3, Form
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import shape_of
from tilestream.options import Options
from tilestream.run import decode, inductor
from tilestream.run.backend import tilestream
from tilestream.run.target import Target

pytestmark = pytest.mark.usefixtures("without_inductor")

OPTIONS = {"target": "reference", "decode_step": True}


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that Inductor is given."""
    seen: list[Any] = []
    inner = inductor.compile_inner
    monkeypatch.setattr(inductor, "compile_inner", lambda gm, *rest: (seen.append(gm), inner(gm, *rest))[1])
    return seen


GPT2S: dict[str, Any] = {"form": GPT2, "width": 128, "heads": 2}


def model(**given: Any) -> Any:
    torch.manual_seed(0)
    return Decoder(**given).bfloat16().eval()


def compiled(module: nn.Module, dynamic: bool | None = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=tilestream, options=OPTIONS, dynamic=dynamic)


def is_step(graphs: list[Any]) -> bool:
    return any(n.target is STEP for graph in graphs for n in graph.graph.nodes)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


CASES: dict[str, dict[str, Any]] = {
    "Llama's": {},
    "Qwen3's": {"form": QWEN3},
    "one head of keys": {"layers": 1, "heads": 2},
    "three heads a head of keys": {"heads": 6},
    "3 sequences": {"batch": 3},
    "GPT-2's": GPT2S,
    "GPT-2's, 2 sequences": GPT2S | {"batch": 2},
    "Granite's": {"times": 0.25},
} | {name: {"form": form} for name, form in FORMS.items() if name not in ("turned parts", "a wide head's")}
CASES["Pythia's"] |= {"heads": 2}
CASES["Phi-4's"] |= {"features": 128}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(8)
def test_tokens_of_a_model(name: str, compiled_graphs: list[Any]) -> None:
    given = CASES[name]
    ours = model(**given)
    eager, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    call = compiled(ours)
    for n in range(4):
        ids = torch.tensor([[3 * n + 1 + s] for s in range(given.get("batch", 1))])
        got, plain, want = call(ids), eager(ids), exact(ids)
        assert error(got, want) <= 2 * error(plain, want) + 1e-4
    assert is_step(compiled_graphs)
    for mine, theirs in zip(ours.layers, exact.layers, strict=True):
        assert int(mine.length) == int(theirs.length) == 4  # pyright: ignore
        assert error(mine.keys, theirs.keys) < 5e-3  # pyright: ignore


@torch.no_grad()
def test_changed_weights_are_seen(compiled_graphs: list[Any]) -> None:
    ours = model()
    call = compiled(ours)
    call(torch.tensor([[1]]))
    ours.layers[1].down.weight.mul_(-3)  # pyright: ignore
    exact = copy.deepcopy(ours).double()
    assert error(call(torch.tensor([[2]])), exact(torch.tensor([[2]]))) < 2e-2
    assert is_step(compiled_graphs)


class Twice(nn.Module):
    """A decoder whose caches are read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.of = model()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.of(ids)
        return logits, self.of.layers[0].keys.sum()  # pyright: ignore


@torch.no_grad()
@pytest.mark.parametrize(
    "module",
    [
        lambda: model(act=nn.functional.softplus),
        lambda: model(form=Form(rotary=0.125)),
        lambda: model(form=Form(gate_up="parts", biased=("gate",))),
        lambda: model(features=32),
        lambda: model().float(),
        Twice,
    ],
    ids=[
        "softplus",
        "8 rotated features",
        "a bias of gate and up",
        "narrow heads",
        "float32",
        "a cache that is read again",
    ],
)
@pytest.mark.every(2)
def test_what_is_no_step_runs_as_before(module: Any, compiled_graphs: list[Any]) -> None:
    ours = module()
    eager = copy.deepcopy(ours)
    ids = torch.tensor([[5]])
    got, want = compiled(ours)(ids), eager(ids)
    for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert error(mine, theirs.double()) < 2e-2
    assert not is_step(compiled_graphs)


@torch.no_grad()
def test_keys_that_are_rotated_otherwise_than_queries(
    compiled_graphs: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turned = static_decoders.turned
    monkeypatch.setattr(static_decoders, "turned", lambda x, cos, sin: turned(x, cos, cos if x.shape[1] == 2 else sin))
    ours = model()
    eager = copy.deepcopy(ours)
    ids = torch.tensor([[5]])
    assert error(compiled(ours)(ids), eager(ids).double()) < 2e-2
    assert not is_step(compiled_graphs) and "queries and keys are not of one position" in caplog.text


@torch.no_grad()
def test_a_block_that_reads_a_part_of_its_product(compiled_graphs: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    ours = model(form=Form(gated=False), act=lambda x: nn.functional.relu(x[..., 48:]))
    for layer in ours.layers:
        layer.down = nn.Linear(48, 64, bias=False).bfloat16()
    eager = copy.deepcopy(ours)
    ids = torch.tensor([[5]])
    assert error(compiled(ours)(ids), eager(ids).double()) < 2e-2
    assert not is_step(compiled_graphs) and "the block reads a part of its product" in caplog.text


LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
WIDE = LLAMA | {"hidden_size": 256}
"""Where a head's features are the width over the heads."""
GPT2_SIZES = {
    "n_embd": 128, "n_inner": 96, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "given", "batch"),
    [
        ("Llama", LLAMA, 1),
        ("Llama", LLAMA, 3),
        ("Qwen3", LLAMA, 1),
        ("Qwen3", LLAMA, 33),
        ("Qwen2", LLAMA, 2),
        ("Mistral", LLAMA, 1),
        ("Gemma", LLAMA, 1),
        ("Granite", LLAMA | {"residual_multiplier": 0.25, "attention_multiplier": 0.1, "logits_scaling": 4.0}, 1),
        ("Phi3", LLAMA | {"pad_token_id": 0}, 2),
        ("StableLm", WIDE, 1),
        ("Starcoder2", LLAMA | {"hidden_size": 256}, 2),
        ("Arcee", LLAMA, 1),
        ("Phi", WIDE, 1),
        ("GPTNeoX", WIDE, 2),
        ("SeedOss", LLAMA, 1),
        ("SmolLM3", LLAMA | {"no_rope_layer_interval": 2, "pad_token_id": 0}, 2),
        ("Jais2", LLAMA, 2),
        ("GPTBigCode", GPT2_SIZES, 1),
        ("GPT2", GPT2_SIZES, 1),
        ("GPT2", GPT2_SIZES, 2),
        ("GPT2", GPT2_SIZES | {"activation_function": "relu"}, 1),
    ],
)
def test_models_of_transformers(
    kind: str, given: dict[str, Any], batch: int, compiled_graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**given)
    ours = (
        getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config).bfloat16().eval()
    )
    for name, p in ours.named_parameters():
        if any(part in name for part in ("norm", "ln_", "bias")):
            p.add_(torch.randn_like(p) * 0.1)
    eager, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    prompt, token = torch.randint(96, (batch, 5)), torch.randint(96, (batch, 1))
    there = torch.ones(batch, 6, dtype=torch.int64)
    for n in range(batch):  # each sequence begins elsewhere
        there[n, : n % 3] = 0
    places = (there.cumsum(-1) - 1).clamp(min=0)

    def behind_prompt(module: Any, call: Any) -> Tensor:
        cache = transformers.StaticCache(config=config, max_cache_len=24)
        module(prompt, past_key_values=cache, attention_mask=there[:, :5], position_ids=places[:, :5])
        return call(token, past_key_values=cache, attention_mask=there, position_ids=places[:, 5:]).logits

    got, plain, want = behind_prompt(ours, compiled(ours)), behind_prompt(eager, eager), behind_prompt(exact, exact)
    assert error(got, want) <= 2 * error(plain, want)
    assert is_step(compiled_graphs) == (batch <= 32)
    if batch > 32:
        assert "33 sequences, and a step has 32 at most" in caplog.text


@torch.no_grad()
def test_a_mask_of_every_head_is_not_taken_for_one_of_every_sequence(
    compiled_graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(**LLAMA)
    ours = transformers.LlamaForCausalLM(config).bfloat16().eval()
    cache = transformers.StaticCache(config=config, max_cache_len=24)
    ours(torch.randint(96, (4, 5)), past_key_values=cache)
    mask = torch.zeros(1, 4, 1, 24, dtype=torch.bfloat16)
    compiled(ours)(torch.randint(96, (4, 1)), past_key_values=cache, attention_mask=mask)
    assert "the mask is not a number of bf16 a position of a sequence" in caplog.text
    assert not is_step(compiled_graphs)


@pytest.mark.parametrize("form", [Form(), QWEN3, FORMS["Pythia's"]])
def test_the_kernel_begins_to_be_compiled_where_a_step_is_found(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that the operator asks for, of its operands."""
    ahead: list[Any] = []
    monkeypatch.setattr(cache, "compile_ahead", ahead.extend)

    def change(graph: fx.GraphModule) -> fx.GraphModule:
        found = decode.stepped(graph, Options(cache=False), Target("cuda", torch.device("cpu"), H200))
        assert found is not None
        return found[0]

    (graph,) = capture(model(form=form, heads=2), (torch.tensor([[1]]),), change=change).graphs
    (node,) = graph.graph.find_nodes(op="call_function", target=STEP)
    row, _, _, mask, weights, caches, _, text, *_ = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], node.args)
    assert ahead == [StepKernel(shape_of(row, mask, weights, caches, Form.of(text))).source]


@torch.no_grad()
def test_each_size_of_cache_is_a_step(compiled_graphs: list[Any]) -> None:
    """Dynamo makes the second cache's size symbolic, which no kernel's is; a full one is eager's error."""
    ours = model()
    call, exact = compiled(ours, dynamic=None), copy.deepcopy(ours).double()
    for positions in (24, 16, 2):
        held = [
            (torch.randn(1, 2, positions, 64).bfloat16(), torch.randn(1, 2, positions, 64).bfloat16(), torch.tensor(0))
            for _ in ours.layers
        ]
        wide = [(k.double(), v.double(), n.clone()) for k, v, n in held]
        for token in range(2):
            ids = torch.tensor([[token]])
            assert error(call(ids, held), exact(ids, wide)) < 2e-2
        assert sum(is_step([graph]) for graph in compiled_graphs) == len(compiled_graphs)
    with pytest.raises(IndexError):
        call(torch.tensor([[1]]), held)  # pyright: ignore[reportPossiblyUnbound]
    assert len(compiled_graphs) == 3


WAYS = ("compile_config", "forward", "in place")


def small(kind: str) -> Any:
    """A model of transformers with random weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=96, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()


def given_to_generate(module: Any, way: str, **given: Any) -> dict[str, Any]:
    """What makes ``generate`` decode by us, in one of its ways."""
    from transformers import CompileConfig  # pyright: ignore[reportMissingImports]

    torch._dynamo.reset()
    ours: dict[str, Any] = {"backend": "tilestream", "options": OPTIONS, **given}
    if way == "compile_config":
        config = CompileConfig(mode=None, **ours)
        config._compile_all_devices = True
        return {"compile_config": config}
    if way == "forward":
        module.forward = torch.compile(module.forward, **ours)
    else:
        module.compile(**ours)
    return {}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "way"), [("Llama", "compile_config"), *(("Qwen3", way) for way in WAYS)])
def test_generate(kind: str, way: str, compiled_graphs: list[Any]) -> None:
    """Greedy and sampling, with a cache that grows and weights that change in between."""
    ours, eager = small(kind), small(kind)
    given = given_to_generate(ours, way)
    prompt = torch.randint(1, 96, (1, 5))
    for samples, tokens in ((False, 8), (True, 12)):
        exact = copy.deepcopy(eager).double()
        made = ours.generate(
            prompt, max_new_tokens=tokens, do_sample=samples, cache_implementation="static",
            return_dict_in_generate=True, output_logits=True, **given,
        )  # fmt: skip
        assert made.sequences.shape == (1, 5 + tokens)
        got = torch.cat(made.logits)
        plain, want = (m(made.sequences[:, :-1]).logits[0, 4:] for m in (eager, exact))
        assert error(got, want) <= 2 * error(plain, want)
        if not samples:
            chosen = want.gather(1, made.sequences[0, 5:, None])[:, 0]
            assert (want.amax(1) - chosen <= 2 * (got - want).abs().amax(1)).all()
        for module in (ours, eager):
            module.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert sum(is_step([graph]) for graph in compiled_graphs) == 2


@torch.no_grad()
def test_generate_into_a_cache_that_is_too_small(compiled_graphs: list[Any]) -> None:
    module = small("Llama")
    from transformers import StaticCache  # pyright: ignore[reportMissingImports]

    given = given_to_generate(module, "compile_config")
    for kept in ({"disable_compile": True}, given):
        with pytest.raises(IndexError, match="out of bounds"):
            module.generate(
                torch.ones(1, 5, dtype=torch.int64), max_new_tokens=8, do_sample=False,
                past_key_values=StaticCache(config=module.config, max_cache_len=8), **kept,
            )  # fmt: skip
    assert is_step(compiled_graphs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("way", "given", "cache", "reason"),
    [
        ("forward", {}, "static", "the graph is of several tokens of a sequence"),
        ("forward", {}, "dynamic", ""),
        ("compile_config", {"dynamic": True}, "static", "compile without dynamic=True"),
    ],
)
def test_why_generate_has_no_step(
    way: str, given: dict[str, Any], cache: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(decode, "announce", said.append)
    module, eager = small("Llama"), small("Llama")
    prompt = torch.tensor([[3, 4, 5]])
    asked = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    got = module.generate(prompt, **asked, **given_to_generate(module, way, **given))
    assert any(reason in line for line in said) if reason else not said
    assert torch.equal(got, eager.generate(prompt, **asked))


@torch.no_grad()
def test_graphs_that_write_no_cache_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is on by default, and most graphs are no decoders."""
    assert Options().decode_step
    said: list[str] = []
    monkeypatch.setattr(decode, "announce", said.append)
    torch._dynamo.reset()
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    torch.compile(layers, backend=tilestream, options={"target": "reference"})(torch.zeros(8, 64).bfloat16())
    assert not said


@torch.no_grad()
def test_generate_behind_a_padded_prompt(compiled_graphs: list[Any]) -> None:
    ours, eager = small("Llama"), small("Llama")
    prompt, kept = torch.tensor([[0, 0, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    made = ours.generate(
        prompt, attention_mask=kept, max_new_tokens=6, do_sample=False, cache_implementation="static",
        return_dict_in_generate=True, output_logits=True, **given_to_generate(ours, "compile_config"),
    )  # fmt: skip
    got, exact = torch.cat(made.logits), copy.deepcopy(eager).double()
    plain, want = (m(made.sequences[:, 2:-1]).logits[0, 2:] for m in (eager, exact))  # as without what is padded
    assert error(got, want) <= 2 * error(plain, want)
    assert is_step(compiled_graphs)
