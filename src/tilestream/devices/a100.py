"""NVIDIA A100 SXM, 80 GB: predictions only, the kernels need Hopper.

Queue figures are Kitsune's, measured on an A100 (section 2.1): 54 queues at once, 37 GB/s a queue with
tiles of 128 to 256 KB, synchronisation 63% of the transfer at 64 KB and twelve times it at 1 KB.
Other rates are the data sheet's times the share that an H200 reaches of its own. Not measured by us.
"""

from tilestream.devices.device import Device

A100 = Device(
    name="a100",
    compute_capability=(8, 0),
    sms=108,
    clock_hz=1.41e9,
    shared_bytes_per_cta=166_912,
    shared_bytes_per_sm=167_936,
    registers_per_cta=65_536,
    l2_bytes=40_000_000,
    dram_bytes=80_000_000_000,
    dram_bytes_per_s=1.8e12,
    l2_bytes_per_s=4.0e12,  # 54 queues x 37 GB/s, each byte written and read
    l2_shared_bytes_per_s=4.5e12,
    tensor_flops={"bf16": 260e12, "f16": 260e12, "f32": 130e12},
    simt_flops=108 * 64 * 1.41e9,
    sfu_ops_per_s=108 * 16 * 1.41e9,
    launch_s=2.5e-6,
    queue_curve=((1_024, 0.22e-6), (65_536, 1.75e-6), (131_072, 3.5e-6), (262_144, 7.0e-6)),
)
