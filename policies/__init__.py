"""Expert-offloading policies, the contract they share, and what a machine costs: decisions only, no clock and no I/O."""
