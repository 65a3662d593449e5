"""Build a pipeline by hand, check it, run it on the reference machine, and on the GPU if there is one.

    encode --code--> hidden --features--> head --> colour
       \\______________code______________/

Three stages on SMs of their own, joined by queues through the L2. The code goes to two stages: one queue, two
consumers (multicast). ``head`` needs the code and what ``hidden`` makes of it, so the queue is a skip connection.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilestream import (
    Pipeline,
    PipelineDeadlock,
    Queue,
    Residency,
    Role,
    Stage,
    Tensor,
    Tile,
    TileOp,
    Transport,
    VerifyError,
    cuda,
    devices,
    reference,
)
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on

POINT, WIDTH, COLOUR = 63, 128, 3


def tile(name: str, features: int) -> Tile:
    return Tile.of(name, features, "bf16")


def layer(name: str, x: str, features: int, activation: str) -> tuple[TileOp, TileOp]:
    """A linear with bias and what follows it; the result is tile ``name``."""
    return (
        TileOp("linear", tile(f"{name}.sum", features), (x,), (f"{name}.weight", f"{name}.bias")),
        TileOp(activation, tile(name, features), (f"{name}.sum",)),
    )


def parameters(name: str, ins: int, outs: int) -> tuple[Tensor, Tensor]:
    return (
        Tensor.of(f"{name}.weight", Role.PARAMETER, (outs, ins), "bf16"),
        Tensor.of(f"{name}.bias", Role.PARAMETER, (outs,), "bf16"),
    )


def make(depth: int = 4) -> Pipeline:
    encode = Stage.of(
        "encode",
        (TileOp("load", tile("p", POINT), (), ("points",)), *layer("code", "p", WIDTH, "relu")),
        residency=Residency.RESIDENT,
    )
    hidden = Stage.of("hidden", layer("features", "code", WIDTH, "gelu"), residency=Residency.RESIDENT)
    head = Stage.of(
        "head",
        (
            TileOp("cat", tile("both", 2 * WIDTH), ("code", "features")),
            *layer("rgb", "both", COLOUR, "sigmoid"),
            TileOp("store", None, ("rgb",), ("colour",)),
        ),
        residency=Residency.RESIDENT,
    )
    tensors = (
        Tensor.of("points", Role.INPUT, (POINT,), "bf16"),
        Tensor.of("colour", Role.OUTPUT, (COLOUR,), "bf16"),
        *parameters("code", POINT, WIDTH),
        *parameters("features", WIDTH, WIDTH),
        *parameters("rgb", 2 * WIDTH, COLOUR),
    )
    queues = (
        Queue("code", "encode", ("hidden", "head"), Transport.L2, depth),
        Queue("features", "hidden", ("head",), Transport.L2, depth),
    )
    return Pipeline("handmade", tensors, (encode, hidden, head), queues, strategy="spatial")


def random_tensors(pipeline: Pipeline, rows: int) -> dict[str, torch.Tensor]:
    tensors = {"points": torch.randn(rows, POINT).bfloat16()}
    for t in pipeline.by_role(Role.PARAMETER):
        tensors[t.name] = (torch.randn(t.shape) / t.features**0.5).bfloat16()
    return tensors


def eager(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same model in plain PyTorch."""
    functional = torch.nn.functional
    code = torch.relu(functional.linear(t["points"], t["code.weight"], t["code.bias"]))
    features = functional.gelu(functional.linear(code, t["features.weight"], t["features.bias"]))
    both = torch.cat((code, features), 1)
    return torch.sigmoid(functional.linear(both, t["rgb.weight"], t["rgb.bias"]))


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def main(rows: int = 10_000) -> None:
    torch.manual_seed(0)
    pipeline = make()
    verify_on(pipeline, devices.get("h200"))
    print(f"{pipeline.name}: {len(pipeline.stages)} stages, legal on an H200")

    tensors = random_tensors(pipeline, rows)
    exact = reference.run(pipeline, tensors, precision="float64")["colour"]
    got = reference.run(pipeline, tensors)["colour"]
    limit = error(eager(tensors), exact)
    print(f"reference machine: {rows} rows, error {error(got, exact):.1e} (eager {limit:.1e})")
    assert error(got, exact) <= 2 * limit

    print("With queues of one tile, for stages that work on two at once:")
    shallow = make(depth=1)
    for check in (lambda: verify(shallow), lambda: reference.run(shallow, tensors)):
        try:
            check()
        except (VerifyError, PipelineDeadlock) as refusal:
            print(f"  {type(refusal).__name__}: {refusal}")

    wider = replace(pipeline, stages=tuple(s.with_(replicas=2) for s in pipeline.stages))
    assert torch.equal(reference.run(wider, tensors)["colour"], got)
    print("two replicas of each stage: the same bits")

    if why := cuda.available():
        print(f"GPU: left out, {why}")
        return
    kernel = cuda.build(pipeline)
    on_gpu = kernel({name: t.cuda() for name, t in tensors.items()}, rows)["colour"].cpu()
    print(f"GPU: error {error(on_gpu, exact):.1e}")
    assert error(on_gpu, exact) <= 2 * limit


if __name__ == "__main__":
    main()
