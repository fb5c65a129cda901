"""Journal and store of a run, and what a later session makes of them."""
