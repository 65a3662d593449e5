"""NVIDIA H100 SXM, 80 GB: the chip of the H200 with slower memory.

Rates inside the chip are those measured on an H200; memory is the data sheet's 3.35 TB/s times the
share (0.9) that the H200's copy reached of its own. Not measured on an H100.
"""

from dataclasses import replace

from tilestream.devices.h200 import H200

H100 = replace(H200, name="h100", l2_bytes=50_000_000, dram_bytes=80_000_000_000, dram_bytes_per_s=3.0e12)
