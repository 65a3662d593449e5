"""Products over the whole grid: one layer or a feed-forward block of two, with what is in front and behind.

``block`` says what is computed, ``finder`` reads it from a stage. Two schedulers deal the tiles of it to CTAs: one tile
of few rows split over groups and columns (``shared_tile``), or many tiles of 128 rows by 256 columns (``tiled_block``).
"""
