"""What the words of a report mean, for a reader who has not read the documentation."""

DIVIDED = {"Shard(0)": "rows", "Shard(1)": "columns"}
"""What the two warpgroups of an SM divide among them: a tile of rows for each, or one tile by its columns."""
WORDS = (
    ("region", "Operators that can run together as one pipeline. Equal regions are shown once."),
    ("pipeline", "What runs a region: one kernel, or a few, of stages that hand tiles of rows to each other."),
    ("stage", "Layers that the same SMs (the processors of a GPU) run: s0, s1, ... in the order of the data."),
    ("vertical", "Every SM takes tiles of rows through all layers; what is between layers stays on the SM."),
    ("spatial", "Each stage has SMs of its own; tiles pass from SM to SM through queues in the L2 cache."),
    ("shared", "For few rows: all SMs work on the same rows, each on a part of the hidden columns."),
    (
        "bulk",
        "A kernel for each layer, as libraries have them; all that is between layers goes through DRAM. It is here for "
        "comparison.",
    ),
    (
        "Inductor",
        "PyTorch's own compiler, which torch.compile runs by default. In the chart of times it has the whole model. In "
        "the table of a region it has the operators of that region alone, as they run beside pipelines.",
    ),
    ("candidate", "A pipeline, or Inductor, for a region. The one that takes least time is chosen."),
    ("registers", "Of a thread that computes, as estimated."),
)
