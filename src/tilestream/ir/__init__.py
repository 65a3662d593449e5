"""What a plan says: tile ops, stages, queues and pipelines; their text, their rules, their sizes."""
