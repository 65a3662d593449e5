"""FuseFlow's results again: each study's rows beside the published ones."""
