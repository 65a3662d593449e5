"""A library's GEMM as a stage of the simulator."""

from __future__ import annotations

from math import ceil

from tilestream.devices import Device
from tilestream.simulator.library.products import APART, PLAIN, REDUCE_S, Beside, Product, family_of, tiling
from tilestream.simulator.library.stages import one_stage
from tilestream.simulator.workload import Engine, SimStage, TileWork

SLICES = 4
"""Of the depth of a product whose tiles are one wave: its first slice is there long before its last. Chosen by the
validation set (docs/truth.md)."""


def gemm(name: str, product: Product, device: Device, beside: Beside = PLAIN) -> SimStage:
    """A library's kernel for ``product``, with what it does beside that."""
    t = tiling(product, device, beside)
    family = family_of(product)
    dtype = product.rate_dtype(device)
    read, written = beside.distinct(product)
    partial = product.partial_bytes(t.splits)
    kept = 1 - beside.cached
    rate = device.tensor_flops[dtype] / device.sms
    flops = product.flops + beside.more_flops
    work = TileWork(
        tensor_flops=flops,
        dtype=dtype,
        tensor_share=flops / (t.tiles * t.tensor_s * rate + beside.more_flops),
        simt_ops=t.lane_s * t.tiles * device.simt_flops / device.sms + beside.simt_ops,
        sfu_ops=beside.sfu_ops,
        l2_read=partial / 2,
        l2_shared_read=t.shared_read,
        multicast=t.multicast,
        l2_write=product.result_bytes + partial / 2,
        dram_read=read * kept + t.dram_read - read,
        dram_write=written * kept,
    )
    slots = t.ctas_per_sm * device.sms
    late = APART * min(t.compute_s, t.memory_s) / ceil(t.tiles / slots)
    slices = SLICES if t.tiles <= slots else 1
    return one_stage(
        name,
        Engine.TENSOR,
        t.tiles * slices,
        min(t.tiles, slots),
        device.registers_per_sm // t.ctas_per_sm,
        work,
        latency_s=(family.latency_s * (1 + beside.more_products) + late) / slices,
        once=TileWork(latency_s=REDUCE_S if t.splits > 1 else 0.0),
        overlap=family.copies > 0,
    )
