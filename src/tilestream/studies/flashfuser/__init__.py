"""FlashFuser's tables beside ours: its search space, workloads and ablation (arXiv 2512.12949v1, HPCA 2026)."""
