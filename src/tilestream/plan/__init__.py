"""How a pipeline is chosen: candidates made by passes, ranked by a cost model, kept on disk."""
