"""What fits the constants of the models of time, and what holds their predictions against measurements."""
