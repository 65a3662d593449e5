"""What a person reads of a plan: text, an HTML page, a timeline for Perfetto."""
