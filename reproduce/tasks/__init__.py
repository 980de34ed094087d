"""What the experiments are run on: generated data, and the methods that khot is compared with."""
