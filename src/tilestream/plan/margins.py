"""The margins that decide what is timed and what runs: each with the measurement it comes from, or called assumed.

Shares are of microseconds. Measured on an H200 where nothing else is said.
"""

MEASURED = 4
"""Candidates of a region that are timed, besides the fallback and shared tiles: of ten models all of whose candidates
were timed (``benchmarks/results/candidates.json``) the fastest was the first by prediction in eight, else the second
and the third."""
MINOR = 0.1
"""Regions that together have at most this share of the time of all regions of a graph are timed with the best kernel by
prediction alone. That is the fastest of nine of the ten models of ``MEASURED`` and 16 % slower than it of one, and of
shared tiles 5 % slower in the mean: half a percent of the regions' time. One predicted to be slower than a library is
left to it."""
HOPELESS = 1.25
"""Candidates predicted this many times slower than the best are not timed: of 215 timed regions that cost 2 % of time
in five, and a limit of 1.5 in four."""
HOPELESS_SHARED = 1.5
"""The same for shared tiles, whose predictions err more: of 144 kernels of one layer the best by
prediction takes 5 % longer than the best in the mean, 19 % at most (``docs/few-rows-results.md``)."""
APART = 0.9
"""The layers of a block on many rows are launches by themselves if they are predicted to take at most this share of the
block as one launch. Assumed: of either kernel predictions err by a twentieth."""
SHARED = 11
"""Splits of a shared tile that are timed. Assumed: as many as FlashFuser compiles."""
SHARED_EACH = 2
"""Splits of one tail and one way to hand the middle over, and of the highest tiles, among them, as far as there is
room. Assumed: where the model errs, it errs between these."""
SHARED_ALONE = 6
"""Splits of a single layer that are timed, one of each tail among them: of 24 layers that were timed, and in decoders,
the best was among the best five by prediction, or a hundredth faster than these."""
SHARED_TILED = 3
"""Splits on many rows that are timed. Of seven layers of BERT and SmolLM at 1,024 rows (H100) the first by prediction
was the fastest in each. Of two layers assumed: such kernels take longest to compile."""
GRADIENT_ROWS = 4096
"""Rows from which on weight gradients may be launches of ours. Assumed: fewer are a handful of microseconds for
anybody."""
PROMISING = 0.9
"""A region's way with a tail is timed if it is predicted to take at most this share of what the region takes. Assumed:
what is timed beside it takes seconds of a first call, and predictions err by about as much."""
MARGIN = 0.99
"""What replaces the fallback must take at most this share of its time. Assumed: half a percent of noise in either time,
each a median of 7 to 20 rounds."""
MARGIN_SHOWN = 0.999
"""The same where nothing is timed. Assumed: two sums of the same kernels differ by rounding."""
MARGIN_WHOLE = 1.0
"""The same of a graph with its regions, whose kernels were each held against Inductor's before. Assumed: there is no
reason left to prefer either."""
EAGER = 0.95
"""Eager's kernels run a whole graph if they take at most this share of what others do. Assumed: in a plain loop the
host calls several times as many."""
BEYOND = 0.95
"""A pipeline that takes at most this share of what the fallback cannot beat needs no comparison. Assumed: the bound is
itself predicted, from a library's products at their best rate."""
LOST = 2.0
"""Nothing is timed where the best pipeline is predicted to take this many times what the fallback takes. Assumed: of
the plans that ``LOST_LONG`` was measured on, none was predicted twice too slow."""
LONG_US, LOST_LONG = 200.0, 1.05
"""The same where that is longer than ``LONG_US``: in 14 such plans that timed both, no pipeline took less of the
fallback's time than was predicted (1.00 to 1.96 of that), and such candidates are two seconds of a first call."""
SPATIAL = 0.9
"""Where a program fits one SM, stages over SMs are timed only if they are predicted to take this share of the best such
pipeline: in 45 plans that timed both, no such prediction was more than 0.93, and one was the faster, by a kernel that
has lost its spills since."""
DEALT = 0.95
"""Layers in place are not timed where tiles dealt over the grid are predicted to take less than this share of it: in
three plans that timed both they were never the faster, and their kernels take longest to compile."""
SURE = 0.7
"""The fallback is not timed where a pipeline takes this share of what that is predicted to take: of 22 regions whose
fallback was timed and predicted to take over 20 us, one took less than 0.80 of that (GraphCast's widest: 0.62 to 0.77
in four runs, where a pipeline takes 1.14); of seven small ones, none less than 0.63."""
LIKELY = 0.75
"""The fallback will be timed where no pipeline is predicted to take less than this share of its prediction: of eleven
plans above it whose fallback was timed one took less than ``SURE``; of four between the two, two did."""
CLEAR = 0.15
"""Regions whose measured gain is at least this share of the whole's time need no second compilation. Assumed: what they
can stand in the way of is less."""
CLEAR_OF_SUMS = 0.02
"""The same where every launch is one of weight gradients. Without us they are a library's products, which Inductor
fuses with nothing, so that regions stand in nobody's way; what it gains by fusing their biases' sums is less than what
is not counted: the sums gained 941 us of GraphCast's backward graph where 388 were counted, 108 of DLRM's for 87."""
PAYS = 0.01
"""The same for what regions gain besides what Inductor saves by fusing over their borders, as predicted. Of seven
graphs of ``benchmarks/results`` that were compiled both ways (fresh models, training, ``whole``) and of ViT-tiny, BERT,
ConvNeXt-T, Swin-T and EfficientNet-B0 those with regions were faster in all, by 0.3 to 10 times what regions gained."""
SORTS = 1.25
"""Sums of a joint graph are sorted where they are predicted to gain so many times what the sort takes. Backward saves
what they read, so that it is in memory, which Inductor's kernel adds while it makes it: that is not counted. SchNet's
training step was to gain 1.2 times its sorts, and was 4 % slower, timed on an H200; its inference gains by them
(docs/gnn.md)."""
STEP = 0.8
"""A decode step that takes at most this share of what the graph's regions take, each by itself, and launches of what is
in none, needs no graph of them:
launches that start early hide a tenth of a region (``benchmarks/results/decode_step.json`` has steps of 0.36 to 0.65 of
whole graphs that have regions, and one that took as long)."""
EACH_SHOWN = 4
"""Of a strategy, the candidates that are simulated where nothing is timed: of 896 choices on scaled devices
(``benchmarks/fit/scaled_devices.py``) four leave none wrong."""
PATIENCE_S = 5.0
"""Once one candidate is timed, those not built by this time are not waited for. Assumed: a first call that nothing was
kept for must not take minutes; the longest kernel takes eight seconds."""
PATIENT_S = 60.0
"""The same under ``effort="exhaustive"``. Assumed: who asks for that waits."""
COPIED = 0.5
"""Rows that bulk copies cannot address are copied where that is predicted to take this share of what loader warps take
for them. Assumed: part of that hides behind products. The region is timed with the copies as they are."""
