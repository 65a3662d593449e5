"""NVIDIA H200 SXM, 141 GB. Measured on one H200 with CUDA 13.0, driver 580."""

from tilestream.devices.device import Device

H200 = Device(
    name="h200",
    compute_capability=(9, 0),
    sms=132,
    clock_hz=1.7e9,  # read under wgmma load: 1.67 to 1.70 GHz
    shared_bytes_per_cta=232_448,
    registers_per_cta=65_536,
    l2_bytes=60_000_000,
    dram_bytes=141_000_000_000,
    dram_bytes_per_s=4.3e12,  # copy kernel; the best GEMM read 4.05
    l2_bytes_per_s=5.6e12,  # ring queues with 128 KB tiles: 2.8 TB/s of payload, written and read
    l2_shared_bytes_per_s=9e12,  # weights read by all SMs of a fused FFN; one SM took up to 90 KB/us
    # 790: cuBLAS 8192^3 for seconds on end. wgmma alone reaches 910 until the clock falls; tf32 is half of bf16.
    tensor_flops={"bf16": 790e12, "f16": 790e12, "f32": 395e12},
    simt_flops=132 * 128 * 1.7e9,
    sfu_ops_per_s=132 * 16 * 1.7e9,
    launch_s=2.5e-6,  # launch gap 1.2 us, first load 1.4 us in a CUDA graph
    queue_curve=((2_048, 0.92e-6), (16_384, 1.28e-6), (65_536, 2.05e-6), (131_072, 3.1e-6)),  # 66 pairs of SMs at once
    # The 8 x 256 chain in 16 pipelines of 8 stages: 609 us, of which 3.3 us a step is tensor work and 1.5 us hand-over.
    queue_exposed=0.65,
    turnaround_s=0.25e-6,  # about 400 cycles; estimated from the bubbles of the same chain, not timed alone
    # Resident at about 200 KB of shared memory a CTA. Hopper's largest portable cluster has 8 CTAs, 16 on request.
    clusters=((2, 66), (4, 30), (6, 17), (8, 15), (16, 7)),
    # Bulk copies from shared memory to the next CTA's along a cluster of 8, two slots and an mbarrier each: 3.0 TB/s
    # for all SMs with 16 KB, 3.7 with 64 KB. In a cluster of 2 16 KB take 0.42 us.
    dsm_curve=((16_384, 0.54e-6), (65_536, 1.74e-6)),
    dsm_bytes_per_s=3.7e12,
    handoff_ops=4.0,  # counted in the SASS: convert and pack (1), bias (1), swizzled address and store (2)
)
