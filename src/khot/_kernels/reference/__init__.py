"""The reference kernels: plain torch, any device. The oracle of every faster kernel."""
