"""The reference kernels, in plain torch for any device. Every faster kernel is tested against them."""
