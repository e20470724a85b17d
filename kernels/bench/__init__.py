"""Are the GPU's kernels right, and how close to the roofs are they? The same cases are checked and timed."""
