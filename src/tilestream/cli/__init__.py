"""The command line, and what it shows on a terminal."""
