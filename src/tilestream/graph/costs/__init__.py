"""What an ATen operator is and costs: one table, one cost each.

Coverage, the plan of a whole model, the study of Kitsune and, through them, the simulator's library kernels read it
here and nowhere else. ``table`` has families, ``elements`` the instructions of one element, ``flops`` those of tensor
cores, ``work`` all of a node.
"""
