"""Small programs, as the front end makes them: one stage that holds every op of a region."""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline, Role, Stage, Tensor, Tile, TileOp


class Program:
    """Collects ops; ``build`` gives the one-stage pipeline."""

    def __init__(self, name: str, dtype: str = "bf16") -> None:
        self.name = name
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.ops: list[TileOp] = []

    def tensor(self, name: str, role: Role, *shape: int, dtype: str = "") -> str:
        self.tensors.append(Tensor.of(name, role, shape, dtype or self.dtype))
        return name

    def load(self, name: str, features: int, dtype: str = "") -> Tile:
        self.tensor(name, Role.INPUT, features, dtype=dtype)
        return self.op("load", features, params=(name,), dtype=dtype)

    def gather(self, table: str, index: str, features: int, dtype: str = "", rows: int | None = None) -> Tile:
        """Rows of a table through an index; each is declared at its first use."""
        known = {t.name for t in self.tensors}
        if table not in known:
            self.tensors.append(Tensor.table(table, rows, features, dtype or self.dtype))
        if index not in known:
            self.tensor(index, Role.INPUT, dtype="i64")
        return self.op("load", features, params=(table, index), dtype=dtype)

    def op(self, kind: str, features: int, *ins: Tile, params: tuple[str, ...] = (), dtype: str = "", **attrs) -> Tile:
        tile = Tile.of(f"{kind}{len(self.ops)}", features, dtype or self.dtype)
        source = f"model.py:{len(self.ops)}"
        self.ops.append(TileOp(kind, tile, tuple(t.name for t in ins), params, tuple(attrs.items()), source))
        return tile

    def linear(self, x: Tile, out: int, act: str = "", bias: bool = True) -> Tile:
        n = len(self.tensors)
        params = (self.tensor(f"w{n}", Role.PARAMETER, out, x.features),)
        if bias:
            params += (self.tensor(f"b{n}", Role.PARAMETER, out),)
        y = self.op("linear", out, x, params=params)
        return self.op(act, out, y) if act else y

    def cat(self, *tiles: Tile) -> Tile:
        return self.op("cat", sum(t.features for t in tiles), *tiles)

    def layer_norm(self, x: Tile) -> Tile:
        n = len(self.tensors)
        params = (self.tensor(f"g{n}", Role.PARAMETER, x.features), self.tensor(f"b{n}", Role.PARAMETER, x.features))
        return self.op("layer_norm", x.features, x, params=params, eps=1e-5, affine="wb")

    def store(self, tile: Tile, dtype: str = "") -> None:
        name = self.tensor(f"y{len(self.tensors)}", Role.OUTPUT, tile.features, dtype=dtype)
        self.ops.append(TileOp("store", None, (tile.name,), (name,), (), f"model.py:{len(self.ops)}"))

    def build(self) -> Pipeline:
        return Pipeline(self.name, tuple(self.tensors), (Stage.of("all", tuple(self.ops)),))


def chain(layers: int = 8, width: int = 256, act: str = "relu", dtype: str = "bf16", bias: bool = True) -> Pipeline:
    p = Program(f"chain{layers}x{width}", dtype)
    h = p.load("x", width)
    for _ in range(layers):
        h = p.linear(h, width, act, bias)
    p.store(h)
    return p.build()


def nerf(points: int = 63, views: int = 27, width: int = 256) -> Pipeline:
    """8 layers with a skip at the fifth, density head, view branch; result cat(colour, density)."""
    p = Program("nerf")
    x, d = p.load("points", points), p.load("views", views)
    h = x
    for layer in range(8):
        h = p.linear(h, width, "relu")
        if layer == 4:
            h = p.cat(x, h)
    alpha = p.linear(h, 1)
    h = p.linear(p.cat(p.linear(h, width), d), width // 2, "relu")
    p.store(p.cat(p.linear(h, 3), alpha))
    return p.build()


def edge_block(width: int = 128, layers: int = 3, act: str = "relu") -> Pipeline:
    """e + LayerNorm(MLP(cat(e, a, b))): MeshGraphNets with 128 and 3 layers, GraphCast with 512, 2 and silu."""
    p = Program(f"edge{width}")
    e, a, b = (p.load(n, width) for n in ("e", "a", "b"))
    h = p.cat(e, a, b)
    for layer in range(layers):
        h = p.linear(h, width, act if layer < layers - 1 else "")
    p.store(p.op("add", width, e, p.layer_norm(h)))
    return p.build()


def elementwise() -> Pipeline:
    """No linear: softmax(sin(x) * 2)."""
    p = Program("elementwise")
    x = p.load("x", 64)
    p.store(p.op("softmax", 64, p.op("mul", 64, p.op("sin", 64, x), scalar=2.0)))
    return p.build()


def slopes(layers: int = 3, kind: str = "sigmoid", width: int = 256, dtype: str = "bf16") -> Pipeline:
    """The derivative of layers whose inputs are made again from what is loaded, each beside its product and alone."""
    p = Program("slopes", dtype)
    y, loaded = p.load("dy", 8), [p.load(f"x{k}", width) for k in range(layers)]
    for x in loaded:
        y = p.op("mul", width, p.linear(y, width), p.op(kind, width, x))
        p.store(y)
    for x in loaded:
        p.store(p.op("softplus", width, x))
    return p.build()
