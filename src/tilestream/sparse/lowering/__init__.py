"""From fused statements to stream graphs."""
