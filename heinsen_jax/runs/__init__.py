"""The folder of a run: names of its files, checkpoints, weights, and loading of its model."""
