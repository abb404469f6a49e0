"""Questions about device memory; results in docs/results/memory.md."""
