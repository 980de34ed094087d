"""The sampling designs, one file per design; :mod:`khot.sampling.table` lists them."""
