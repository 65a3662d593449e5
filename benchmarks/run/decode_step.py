"""A decode step of whole models as one kernel: checked, then timed against eager and Inductor.

    python -m benchmarks.run.decode_step --json FILE                four models, 512 positions, batch 1; UNSEEN has more
    python -m benchmarks.run.decode_step qwen3-0.6b qwen3-0.6b*32      of 32 sequences, too
    python -m benchmarks.run.decode_step --beside                   models compile at once, and are timed in turn
    python -m benchmarks.run.decode_step smollm-135m --kernels      the kernel alone, checked and timed
    python -m benchmarks.run.decode_step --generate                 64 tokens by transformers' generate, too
    python -m benchmarks.run.decode_step rwkv-169m                  RWKV-4 169M, which no kernel of a step computes yet
    python -m benchmarks.run.decode_step --predict                  floors and predictions, no GPU

Needs an H100 or H200, but for ``--predict``. bf16, random weights, a token behind 479 in caches of 512. Of the kernel:
its error against float64, the same bits twice, and as many steps with delays that differ from CTA to CTA. Of whole
models: CUDA graphs of all arms in turn, medians; ``reduce-overhead``, which captures by itself, by events around its
calls. Lengths and states are set back before each call, in every arm. With ``--beside`` first calls are not what one
alone takes. With ``--generate`` models of transformers (needed for it) make 64 tokens behind 16, greedy: microseconds a
token, without the prompt's, by the host's clock, and over the kernel's; by how much float32 eager preferred another
token at most, over its logits' root mean square, and bf16 eager's own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import module_command
from benchmarks.lib.recurrent_decoders import RecurrentDecoder
from benchmarks.lib.static_decoders import Decoder, held_by
from benchmarks.lib.turns import Turns
from tilestream.bench.environment import environment
from tilestream.devices import H200
from tilestream.graph.decode import STEP
from tilestream.graph.decode.op import decode_step
from tilestream.kernels.step.form import GPT2, LLAMA, QWEN3, Form
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape
from tilestream.plan.decode import predicted_us
from tilestream.run.backend import tilestream
from tilestream.run.generate import decoding_loop
from tilestream.run.record_step import operands
from tilestream.run.timing import capture, interleaved

MODELS = {
    "smollm-135m": Shape(30, 576, 1536, 9, 3, 64, 512, 49152),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 512, 151936, form=QWEN3),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 512, 128256),
    "gpt2": Shape(12, 768, 3072, 12, 12, 64, 512, 50257, form=GPT2),
}
BIASED = ("query", "output", "gate", "down")
UNSEEN = {
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 512, 151936, form=Form(biased=("query",))),
    "pythia-160m": Shape(
        12, 768, 3072, 12, 12, 64, 512, 50304,
        form=Form("layer", activation="gelu", gated=False, biased=BIASED, qkv="heads", rotary=0.25, parallel=True),
    ),
    "phi-1.5": Shape(
        24, 2048, 8192, 32, 32, 64, 512, 51200,
        form=Form("layer", activation="gelu_tanh", gated=False, biased=(*BIASED, "head"), rotary=0.5, parallel=True),
    ),
    "stablelm-2-1.6b": Shape(
        24, 2048, 5632, 32, 32, 64, 512, 100352, form=Form("layer", rotary=0.25, biased=("query",))
    ),
    "phi-4-mini": Shape(32, 3072, 8192, 24, 8, 128, 512, 200064, form=Form(qkv="parts", gate_up="parts", rotary=0.75)),
    "granite-3.3-2b": Shape(40, 2048, 8192, 32, 8, 64, 512, 49155),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 128, 512, 151936, form=Form(biased=("query",))),
}  # fmt: skip
"""Decoders that nothing was tuned on."""
RECURRENT = "rwkv-169m"
PLACE, ROUNDS = 479, 15
ARMS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "tilestream": {"backend": tilestream, "options": {"decode_step": False}},
    "tilestream, decode step": {"backend": tilestream, "options": {"decode_step": True}},
}

REDUCED = "reduce-overhead"
TOKENS, CALLS, LOOP = 64, 5, "tilestream, decoding loop"
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor, reduce-overhead": {},
    "tilestream, decode step": {"backend": tilestream, "mode": None, "options": {"decode_step": True}},
    "tilestream, decode step, CUDA graphs": {
        "backend": tilestream,
        "mode": None,
        "options": {"decode_step": True, "triton.cudagraphs": True},
    },
    LOOP: {"backend": tilestream, "mode": None, "options": {"decode_step": True}},
}
"""Arguments of ``CompileConfig``; None: not compiled."""


def converted(given: list[Any], dtype: torch.dtype) -> list[Any]:
    """A copy of operands in another precision."""

    def one(v: Any) -> Any:
        if isinstance(v, list):
            return [one(x) for x in v]
        return v.to(dtype, copy=True) if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    return [one(v) for v in given]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def kernel_us(given: list[Any]) -> float:
    """Of the kernel alone: a median of CUDA graphs."""
    return statistics.median(interleaved([capture(lambda: STEP(*given), 1000.0, 20)], ROUNDS)[0])


def checked(s: Shape, steps: int) -> dict[str, Any]:
    """The kernel on a cut model: its error and whether bits repeat, also with delays."""
    from tilestream.cuda.step import loaded

    small = replace(s, layers=min(s.layers, 4))
    given = operands(small, PLACE)
    want = decode_step(*converted(given, torch.float64))
    got = [STEP(*converted(given, torch.bfloat16)) for _ in range(3)]
    again = converted(given, torch.bfloat16)
    delayed, numbers = loaded(StepKernel(small, delays=True), 0), (0, *again[9:])
    same = all(torch.equal(delayed(*again[:7], numbers=numbers), got[0]) for _ in range(steps))  # pyright: ignore
    return {
        "error": error(got[0], want),
        "repeats": all(torch.equal(g, got[0]) for g in got),
        "repeats_with_delays": same,
        "steps_with_delays": steps,
    }


def generated(s: Shape, kernel_us: float | None, device: str = "cuda", tokens: int = TOKENS) -> list[dict[str, Any]]:
    """A row an arm: microseconds of a token that ``generate`` makes, and how far its tokens are from the best."""
    import transformers  # pyright: ignore[reportMissingImports]

    kind = "Qwen3" if s.form.head_norms else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=s.layers, hidden_size=s.width, intermediate_size=s.hidden, num_attention_heads=s.heads,
        num_key_value_heads=s.key_heads, head_dim=s.features, vocab_size=s.vocabulary, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    prompt = torch.randint(1, s.vocabulary, (1, 16), device=device)
    rows = []
    for arm, given in WAYS.items():
        torch._dynamo.reset()
        ways: dict[str, Any] = {"disable_compile": True}
        if given is not None:
            ways = {"compile_config": transformers.CompileConfig(**given)}
            ways["compile_config"]._compile_all_devices = True
        if arm == LOOP:
            ways["custom_generate"] = decoding_loop
        cache = transformers.StaticCache(config=config, max_cache_len=s.positions)

        def call(n: int, ways: dict[str, Any] = ways, cache: Any = cache) -> tuple[torch.Tensor, float]:
            cache.reset()
            start = time.perf_counter()
            made = model.generate(prompt, max_new_tokens=n, do_sample=False, past_key_values=cache, **ways)
            told = made.tolist()  # and so the GPU is done
            return torch.tensor(told, device=device), time.perf_counter() - start

        first_call_s = call(tokens)[1]
        call(tokens)
        took = [call(tokens)[1] - call(1)[1] for _ in range(CALLS)]
        us = 1e6 * statistics.median(took) / (tokens - 1)
        ids = call(tokens)[0]
        want = exact(ids[:, :-1]).logits[0, 15:]
        left = want.amax(1) - want.gather(1, ids[0, 16:, None])[:, 0]
        row = {"arm": arm, "first_call_s": first_call_s, "us_a_token": us}
        row |= {"over_kernel": us / kernel_us if kernel_us else None}
        rows.append(row | {"behind_best": float(left.max() / want.square().mean().sqrt())})
    return rows


def model_of(s: Shape) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {n: v for n, v in vars(s).items() if n not in ("masked", "warps")}
    with torch.device("cuda"):
        made = Decoder(**sizes)
    for length in lengths_of(made):
        length.fill_(PLACE)
    return made.bfloat16().eval()


def lengths_of(module: Decoder) -> list[torch.Tensor]:
    return [length for _, _, length in held_by(module.layers)]


def timed(module: torch.nn.Module, ids: torch.Tensor, states: list[torch.Tensor], turns: Turns) -> list[dict[str, Any]]:
    """A row an arm: microseconds of a step of the whole model, its error against float64, its first call."""
    first = [n.clone() for n in states]
    want = copy.deepcopy(module).double()(ids)

    def behind_reset(call: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            torch._foreach_copy_(states, first)  # pyright: ignore
            return call(ids)

        return run

    calls, rows = {"eager": behind_reset(module)}, {"eager": {"first_call_s": 0.0}}
    torch._dynamo.reset()
    with turns.compiling():
        for arm, given in {**ARMS, REDUCED: {"mode": REDUCED}}.items():
            calls[arm] = behind_reset(torch.compile(module, dynamic=False, **given))
            start = time.perf_counter()
            calls[arm]()
            torch.cuda.synchronize()
            rows[arm] = {"first_call_s": time.perf_counter() - start}
        for arm, call in calls.items():
            rows[arm]["error"] = error(call(), want)
    reduced = calls.pop(REDUCED)
    with turns.alone():
        graphs = [capture(call, 1000.0, 20) for call in calls.values()]
        for arm, samples in zip(calls, interleaved(graphs, ROUNDS), strict=True):
            rows[arm]["us"] = statistics.median(samples)
        rows[REDUCED]["us"] = statistics.median([by_events(reduced) for _ in range(40)][10:])
    return [{"arm": arm, **row} for arm, row in rows.items()]


def by_events(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def shape_of(case: str) -> Shape:
    """Of ``MODEL`` or ``MODEL*BATCH``."""
    name, _, batch = case.partition("*")
    return replace((MODELS | UNSEEN)[name], batch=int(batch or 1))


def predicted(s: Shape) -> dict[str, Any]:
    return {
        "floor_us": 1e6 * s.weight_bytes / H200.dram_bytes_per_s,
        "predicted_us": predicted_us(s, H200),
        "hand_overs": s.hand_overs,
        "predicted_us with a tenth of the hand-over": predicted_us(s, H200.scale("hand_over_s", 0.1)),
    }


@torch.no_grad()
def measured(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """All of a case, ``MODEL`` or ``MODEL*BATCH``."""
    turns = Turns(given.turns, 300.0)
    if given.turns:
        turns.take_part()
    if case == RECURRENT:
        torch.manual_seed(0)
        with torch.device("cuda"):
            recurrent = RecurrentDecoder().bfloat16().eval()
        return {"arms": timed(recurrent, torch.tensor([5], device="cuda"), list(recurrent.buffers()), turns)}
    s = shape_of(case)
    found = predicted(s)
    if given.predict:
        return found
    found["kernel"] = checked(s, given.steps)
    found["arms"] = []
    if not given.kernels:
        module, ids = model_of(s), torch.arange(5, 5 + s.batch, device="cuda")[:, None]
        found["arms"] = timed(module, ids, lengths_of(module), turns)
    with turns.alone():
        us = kernel_us(operands(s, PLACE))
    found["kernel"] |= {"kernel_us": us, "bytes_per_s": 1e6 * s.weight_bytes / us}
    if given.generate and s.form in (LLAMA, QWEN3) and s.batch == 1:
        print(case, json.dumps(found), flush=True)
        found["generate"] = generated(s, us)
    return found


def beside(given: argparse.Namespace) -> dict[str, Any]:
    """Each case in a process of its own, at once."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--steps", str(given.steps), *(f"--{n}" for n in ("kernels", "generate") if getattr(given, n))]
        command = [*module_command("run.decode_step"), "--turns", folder, *flags]
        files = {case: Path(folder, f"{n}.json") for n, case in enumerate(given.cases)}
        started = [subprocess.Popen([*command, case, "--json", str(file)]) for case, file in files.items()]
        for case, process in zip(given.cases, started, strict=True):
            if process.wait() == 0:
                found |= json.loads(files[case].read_text(encoding="utf-8"))["cases"]
            else:
                print(f"{case} failed", flush=True)
    return found


def main() -> None:
    wanted = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    wanted.add_argument("cases", nargs="*", default=list(MODELS), metavar="MODEL[*BATCH]")
    wanted.add_argument("--steps", type=int, default=10_000, help="with delays")
    wanted.add_argument("--kernels", action="store_true", help="the kernels alone")
    wanted.add_argument("--generate", action="store_true", help="tokens by transformers, too")
    wanted.add_argument("--predict", action="store_true")
    wanted.add_argument(
        "--beside", action="store_true", help="a process a case: they compile at once, and time in turn"
    )
    wanted.add_argument("--turns", type=Path, help="a folder that processes beside each other share")
    wanted.add_argument("--json", type=Path)
    given = wanted.parse_args()
    if unknown := {case.partition("*")[0] for case in given.cases} - {*MODELS, *UNSEEN, RECURRENT}:
        wanted.error(f"no model is called {min(unknown)}")
    found: dict[str, Any] = {}

    def keep(more: dict[str, Any]) -> None:
        found.update(more)
        if given.json:
            text = {"schema": 1, "environment": {} if given.predict else environment(), "cases": found}
            given.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")

    if given.beside:
        keep(beside(given))
        return
    for case in given.cases:
        keep({case: measured(case, given)})
        print(case, json.dumps(found[case]), flush=True)


if __name__ == "__main__":
    main()
