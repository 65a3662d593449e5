"""What makes tables and pages of the documentation from results."""
