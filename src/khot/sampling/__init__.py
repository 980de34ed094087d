"""k-hot sampling: designs that draw k of n with given inclusion probabilities."""
