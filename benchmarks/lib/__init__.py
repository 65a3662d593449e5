"""What several share: cases, models, turns at a GPU, sampling, parts of pages."""
