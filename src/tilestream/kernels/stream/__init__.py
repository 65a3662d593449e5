"""Row streams: tiles of rows through resident stages, one consumer function a kind of stage."""
