"""What khot costs; the clocks are those of the runtime experiment."""

from khot.experiments import timing as timing
